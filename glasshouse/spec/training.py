"""How a network is trained: loss, optimizer, when to stop, evaluate and save."""

from typing import Annotated, Literal, Self

from pydantic import Field as Constraint
from pydantic import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from glasshouse.spec.network import Input
from glasshouse.spec.strict import (
    Args,
    Name,
    Spec,
    TorchName,
    WrongAt,
    check_at_most_one,
    check_exactly_one,
)

Judged = Annotated[str, Constraint(pattern=r"^validation/.{1,190}$")]
"""A metric of the evaluations: ``validation/loss``, ``validation/accuracy``."""


class Init(Spec):
    """What training begins with, instead of weights drawn from the seed."""

    checkpoint: str = Constraint(min_length=1, max_length=500)
    """A checkpoint's id (``ckpt_…``). Without the service: its directory."""
    load: Literal["model", "all"] = "model"
    """``model``: its weights; training begins with step 0. ``all``: the whole run, which goes on
    where the checkpoint ends; then network, training data, seed and type of optimizer must be those
    that it was made with."""
    missing: Literal["fail", "init", "zero"] = "fail"
    """Of ``model``, what becomes of a parameter that the checkpoint has not: the job is refused; it
    is drawn from the seed; or it is zero. But for ``fail`` the checkpoint may also have others,
    which are left out. A parameter that both have must have the same shape."""

    @model_validator(mode="after")
    def _check_missing(self) -> Self:
        if self.load == "all" and self.missing != "fail":
            detail = f"missing {self.missing!r} applies to load model only, and load is 'all'"
            raise WrongAt("missing", detail=f"{detail}: remove missing, or set load to model")
        return self


class Loss(Spec):
    """A torch.nn loss, by torch's name and arguments."""

    type: TorchName
    args: Args = {}
    inputs: tuple[Input, ...] = Constraint(min_length=1, max_length=8)
    """What it compares, in the order of the loss's own arguments: layers or data fields."""
    lengths: Input | Literal[False] | None = None
    """Only the steps within these lengths are compared, such as ``text.lengths``; what stands
    behind the end of a row is not. Default: the lengths of the sequence field whose steps axis 1 of
    its inputs are. ``false``: padding is compared too."""
    weight: PositiveFloat = 1.0
    """It counts so many times."""
    name: Name | None = None
    """Its value is the metric ``loss/<name>``; left out, one of several is called by its type."""

    @property
    def reads(self) -> tuple[str, ...]:
        """All that it needs: its inputs, and the lengths."""
        return (*self.inputs, *((self.lengths,) if self.lengths else ()))


Losses = Loss | Annotated[tuple[Loss, ...], Constraint(min_length=1, max_length=20)]
"""A loss, or several whose weighted sum is what training makes small."""


class SparseOptimizer(Spec):
    """A torch.optim optimizer that takes sparse gradients, by torch's name and arguments."""

    type: Literal["SGD", "Adagrad", "SparseAdam"]
    args: Args = {}


class Optimizer(Spec):
    """A torch.optim optimizer, by torch's name and arguments."""

    type: TorchName
    args: Args = {}
    l1: NonNegativeFloat = 0.0
    """So many times the sign of each parameter is added to its gradient, after clipping: the
    penalty ``l1 · |w|``, which the loss does not show. A layer may have its own."""
    sparse: SparseOptimizer | None = None
    """What updates the parameters with sparse gradients (``Embedding`` and ``EmbeddingBag`` with
    ``sparse``); all else, ``l1`` too, is of the other ones. Left out, one optimizer updates all."""

    @property
    def of_sparse(self) -> "Optimizer":
        """What updates parameters with sparse gradients, as an optimizer of its own."""
        if self.sparse is None:
            return self
        return Optimizer(type=self.sparse.type, args=self.sparse.args)


class GradScaler(Spec):
    """torch.amp.GradScaler, by torch's names: how losses of float16 are scaled."""

    init_scale: float = Constraint(default=65536.0, ge=1e-4, le=2.0**64)
    """What the loss is multiplied by at first."""
    growth_factor: float = Constraint(default=2.0, gt=1, le=2.0**16)
    """It becomes so many times larger …"""
    growth_interval: PositiveInt = 2000
    """… after so many steps in a row without an overflow."""
    backoff_factor: float = Constraint(default=0.5, gt=0, lt=1)
    """After an overflow it becomes this part of itself."""


class Scheduler(Spec):
    """A torch.optim.lr_scheduler, by torch's name and arguments: it moves the learning rate."""

    type: TorchName
    args: Args = {}
    """By torch's names. ``T_max`` of CosineAnnealingLR and ``total_steps`` of OneCycleLR may be
    left out: the length of the training. ``schedulers`` of SequentialLR and of ChainedScheduler is
    a list of ``{"type", "args"}``."""
    unit: Literal["steps", "epochs", "samples"] = "steps"
    """What the scheduler counts: it goes on by one after each update, after each epoch, or for each
    row that was trained on."""
    metric: Judged | None = None
    """Of ReduceLROnPlateau, which goes on at each evaluation: what it looks at."""

    @model_validator(mode="after")
    def _check_metric(self) -> Self:
        if self.type == "ReduceLROnPlateau" and self.metric is None:
            detail = "ReduceLROnPlateau needs a metric: set it, for one to validation/loss"
            raise WrongAt("metric", detail=detail)
        if self.type != "ReduceLROnPlateau" and self.metric is not None:
            detail = f"metric {self.metric!r} applies to ReduceLROnPlateau only, and type is"
            raise WrongAt("metric", detail=f"{detail} {self.type!r}: remove metric")
        if self.metric is not None and self.unit != "steps":
            detail = f"ReduceLROnPlateau steps at each evaluation: remove unit ({self.unit!r})"
            raise WrongAt("unit", detail=detail)
        return self


class Average(Spec):
    """Weights averaged over the steps; evaluations and checkpoints take them instead of the newest.

    Buffers in floating point, such as those of batch normalisation, are averaged like weights.
    """

    type: Literal["ema", "swa", "window"]
    """``ema``: exponential moving average. ``swa``: the mean of all since ``start_step``.
    ``window``: the mean of about the last ones, as PaddlePaddle's ModelAverage takes it."""
    start_step: NonNegativeInt = 0
    """The first step whose weights are averaged; until then the newest count."""
    every_steps: PositiveInt = 1
    """Then those of every n-th step."""
    decay: float | None = Constraint(default=None, gt=0, lt=1)
    """Of ``ema``: how much of the average stays at each step; left out, 0.999."""
    average_window_rate: float | None = Constraint(default=None, gt=0, le=1)
    """Of ``window``: the window's length as a part of the steps so far; left out, 0.15."""
    min_average_window: PositiveInt | None = None
    """Of ``window``: it is at least so many steps long; left out, 10,000."""
    max_average_window: PositiveInt | None = None
    """Of ``window``: and at most so many; left out, 10,000."""

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        of_window = ("average_window_rate", "min_average_window", "max_average_window")
        applies = {"decay": "ema", **dict.fromkeys(of_window, "window")}
        for name, kind in applies.items():
            if self.type != kind and (value := getattr(self, name)) is not None:
                detail = f"{name} ({value}) applies to {kind} only, and type is {self.type!r}"
                raise WrongAt(name, detail=f"{detail}: remove {name}")
        least, most = self.min_average_window or 10_000, self.max_average_window or 10_000
        if least > most:
            detail = f"min_average_window ({least}) is greater than max_average_window ({most})"
            given = "max" if self.min_average_window is None else "min"
            raise WrongAt(f"{given}_average_window", detail=f"{detail}; both default to 10000")
        return self


class Early(Spec):
    """Training ends before its time once a metric has stopped getting better."""

    metric: Judged
    """Of the evaluations, such as ``validation/loss``."""
    mode: Literal["min", "max"]
    """Whether less of it is better, or more."""
    patience: PositiveInt
    """So many evaluations in a row without a better value are the end."""
    min_delta: NonNegativeFloat = 0.0
    """A value is better only if it is by more than this."""


class Stop(Spec):
    """When training ends. Exactly one of epochs, steps and seconds."""

    epochs: int | None = Constraint(default=None, ge=1, le=1_000_000)
    steps: int | None = Constraint(default=None, ge=1, le=1_000_000_000)
    seconds: PositiveFloat | None = None
    """Training stops at the first step boundary after this many seconds of training."""
    early: Early | None = None
    """Or before that. Needs ``evaluate``."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        check_exactly_one(self, "epochs", "steps", "seconds")
        return self


class Evaluate(Spec):
    """When the validation data is run. It is always run once more at the end.

    ``validation/loss`` is the loss of all its rows as one batch, whatever ``data.batch_size``: the
    sum of the batches' numerators over the sum of what torch's mean divides by (rows, steps without
    padding, or the weights of the targets that are not ignored).
    """

    every_epochs: PositiveInt | None = None
    every_steps: PositiveInt | None = None
    samples: int = Constraint(default=0, ge=0, le=1000)
    """Validation rows, evenly spaced and always the same, whose outputs and targets each evaluation
    keeps: the artifact ``samples-<step>.safetensors``."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        check_exactly_one(self, "every_epochs", "every_steps")
        return self


class KeepBest(Spec):
    """Checkpoints that stay because nothing was better when they were made."""

    metric: str = Constraint(min_length=1, max_length=200)
    """A metric of the job: ``validation/accuracy``, ``loss`` … Its newest value counts."""
    mode: Literal["min", "max"]
    """Whether less of it is better, or more."""
    count: int = Constraint(default=1, ge=1, le=100)
    """How many stay."""


class Checkpoint(Spec):
    """When everything that training is made of is saved. The end of training always is.

    Neither ``every_epochs`` nor ``every_steps``: at the end of each epoch and after each evaluation
    with a new best value, as long as checkpoints take at most a twentieth of the time. A state that
    is the best and is not saved is held in memory and written ahead of the next checkpoint.
    """

    every_epochs: PositiveInt | None = None
    every_steps: PositiveInt | None = None
    every_s: PositiveFloat | None = 300
    """Also when so many seconds have passed since the last one; null: never by time."""
    keep_last: PositiveInt = 3
    """Older ones are deleted once a newer one is complete."""
    keep_best: KeepBest | None = None
    """These are kept beside the last ones. If unset, one by the metric of ``stop.early``, else by
    the lowest ``validation/loss``; a job without evaluations has none. null: the last ones only."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        check_at_most_one(self, "every_epochs", "every_steps")
        return self

    @property
    def is_named(self) -> bool:
        """Whether the spec says when, and not only by time."""
        return self.every_epochs is not None or self.every_steps is not None

    @property
    def may_hold(self) -> bool:
        """Whether the best state may wait in memory while another one is written."""
        return self.keep_best is not None and not self.is_named
