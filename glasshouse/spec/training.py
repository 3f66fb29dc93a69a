"""How a network is trained: losses, optimizer, schedule, evaluations and checkpoints."""

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

EvaluationMetric = Annotated[str, Constraint(pattern=r"^validation/.{1,280}$")]
"""The name of an evaluation metric: ``validation/loss``, ``validation/accuracy``; with several
sources ``validation/clean/loss``."""


class Init(Spec):
    """Initial weights from a checkpoint, instead of weights drawn from the seed."""

    checkpoint: str = Constraint(min_length=1, max_length=500)
    """The id of a checkpoint (``ckpt_…``), or a version of a published model: ``mnist``,
    ``mnist@production``, ``mnist:3``. When training in-process, without the service: a checkpoint's
    directory."""
    load: Literal["model", "all"] = "model"
    """What to load. ``model``: the weights only; training starts at step 0. ``all``: the whole
    training state; training continues at the step of the checkpoint. ``all`` requires the network,
    training data, seed and optimizer type that the checkpoint was made with."""
    missing: Literal["fail", "init", "zero"] = "fail"
    """With ``load`` ``model``: how to initialize a parameter that the checkpoint does not contain.
    ``fail``: reject the job. ``init``: draw it from the seed. ``zero``: fill it with zeros. With
    ``init`` and ``zero``, parameters that only the checkpoint contains are ignored. A parameter
    that both contain must have the same shape in both."""

    @model_validator(mode="after")
    def _check_missing(self) -> Self:
        if self.load == "all" and self.missing != "fail":
            detail = f"missing {self.missing!r} applies to load model only, and load is 'all'"
            raise WrongAt("missing", detail=f"{detail}: remove missing, or set load to model")
        return self


class Loss(Spec):
    """A loss of torch.nn."""

    type: TorchName
    """The class name of a torch.nn loss; ``GET /catalog/losses`` lists them. Example:
    ``"CrossEntropyLoss"``."""
    args: Args = {}
    """Arguments of the class, by torch's names. Example: ``{"label_smoothing": 0.1}``."""
    inputs: tuple[Input, ...] = Constraint(min_length=1, max_length=8)
    """Layers or data fields, in the order of the loss's own arguments, usually the prediction and
    the target. Example: ``["fc", "label"]``."""
    lengths: Input | Literal[False] | None = None
    """The number of sequence steps to compare in each row; steps after it are ignored. Default: the
    lengths of the sequence field whose steps are axis 1 of the inputs, if there is one. ``false``:
    compare padding too. Example: ``"text.lengths"``."""
    weight: PositiveFloat = 1.0
    """Factor of this loss in the sum that training minimizes."""
    name: Name | None = None
    """The unweighted loss is reported as the metric ``loss/<name>``. Default in a list of losses:
    the type."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The inputs and the lengths."""
        return (*self.inputs, *((self.lengths,) if self.lengths else ()))


Losses = Loss | Annotated[tuple[Loss, ...], Constraint(min_length=1, max_length=20)]
"""One loss, or several whose weighted sum is minimized."""


class SparseOptimizer(Spec):
    """A torch.optim optimizer that supports sparse gradients."""

    type: Literal["SGD", "Adagrad", "SparseAdam"]
    """The class name of the optimizer."""
    args: Args = {}
    """Arguments of the class, by torch's names. Example: ``{"lr": 0.01}``."""


class Optimizer(Spec):
    """A torch.optim optimizer."""

    type: TorchName
    """The class name of the optimizer; ``GET /catalog/optimizers`` lists them. Example:
    ``"AdamW"``."""
    args: Args = {}
    """Arguments of the class, by torch's names. Example: ``{"lr": 0.001, "weight_decay":
    0.01}``."""
    l1: NonNegativeFloat = 0.0
    """Strength of the L1 penalty ``l1 · |w|``: ``l1`` times the sign of each parameter is added to
    its gradient, after clipping. The loss does not include the penalty. A layer can override it
    with its own ``l1``. Example: ``0.0001``."""
    sparse: SparseOptimizer | None = None
    """A second optimizer, for the parameters with sparse gradients (``Embedding`` and
    ``EmbeddingBag`` with ``sparse``). The outer ``type``, ``args`` and ``l1`` then apply to all
    other parameters. Default: one optimizer updates all parameters."""

    @property
    def of_sparse(self) -> "Optimizer":
        """The optimizer of the parameters with sparse gradients."""
        if self.sparse is None:
            return self
        return Optimizer(type=self.sparse.type, args=self.sparse.args)


class GradScaler(Spec):
    """Loss scaling for float16, with the arguments of torch.amp.GradScaler."""

    init_scale: float = Constraint(default=65536.0, ge=1e-4, le=2.0**64)
    """Initial factor of the loss."""
    growth_factor: float = Constraint(default=2.0, gt=1, le=2.0**16)
    """Factor by which the scale grows after ``growth_interval`` steps without an overflow."""
    growth_interval: PositiveInt = 2000
    """Number of consecutive steps without an overflow before the scale grows."""
    backoff_factor: float = Constraint(default=0.5, gt=0, lt=1)
    """Factor by which the scale is multiplied after an overflow."""


class Scheduler(Spec):
    """A learning rate schedule: a class of torch.optim.lr_scheduler."""

    type: TorchName
    """The class name of the scheduler; ``GET /catalog/schedulers`` lists them. Example:
    ``"CosineAnnealingLR"``."""
    args: Args = {}
    """Arguments of the class, by torch's names. ``T_max`` of CosineAnnealingLR and ``total_steps``
    of OneCycleLR default to the length of training. ``schedulers`` of SequentialLR and
    ChainedScheduler is a list of ``{"type", "args"}``. Example: ``{"eta_min": 0.0001}``."""
    unit: Literal["steps", "epochs", "samples"] = "steps"
    """What the scheduler counts. It advances once per update (``steps``), once per epoch
    (``epochs``) or once per training row (``samples``)."""
    metric: EvaluationMetric | None = None
    """The evaluation metric that ReduceLROnPlateau monitors; it advances at each scheduled
    evaluation. Required for ReduceLROnPlateau, rejected for other types. Example:
    ``"validation/loss"``."""

    @model_validator(mode="after")
    def _check_metric(self) -> Self:
        if self.type == "ReduceLROnPlateau" and self.metric is None:
            detail = "ReduceLROnPlateau needs a metric: set it, for example to validation/loss"
            raise WrongAt("metric", detail=detail)
        if self.type != "ReduceLROnPlateau" and self.metric is not None:
            detail = f"metric {self.metric!r} applies to ReduceLROnPlateau only, and type is"
            raise WrongAt("metric", detail=f"{detail} {self.type!r}: remove metric")
        if self.metric is not None and self.unit != "steps":
            detail = f"ReduceLROnPlateau steps at each evaluation: remove unit ({self.unit!r})"
            raise WrongAt("unit", detail=detail)
        return self


class Average(Spec):
    """Weights averaged over training steps.

    Evaluations and checkpoints use the average instead of the newest weights. Floating-point
    buffers, such as the running statistics of batch normalization, are averaged like weights.
    """

    type: Literal["ema", "swa", "window"]
    """``ema``: exponential moving average. ``swa``: mean of all weights since ``start_step``.
    ``window``: mean over about the last steps, as in PaddlePaddle's ModelAverage."""
    start_step: NonNegativeInt = 0
    """First step whose weights are averaged. Until then the newest weights are used. Example:
    ``1000``."""
    every_steps: PositiveInt = 1
    """Interval in steps: from ``start_step`` on, the weights of every n-th step are averaged."""
    decay: float | None = Constraint(default=None, gt=0, lt=1)
    """With ``ema``: the weight of the previous average in each update, between 0 and 1. Default:
    0.999."""
    average_window_rate: float | None = Constraint(default=None, gt=0, le=1)
    """With ``window``: window length as a fraction of the averaged steps so far. Default: 0.15."""
    min_average_window: PositiveInt | None = None
    """With ``window``: minimum window length, in averaged steps. Default: 10,000."""
    max_average_window: PositiveInt | None = None
    """With ``window``: maximum window length, in averaged steps. Default: 10,000."""

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
    """Early stopping: ends training if a metric stops improving."""

    metric: EvaluationMetric
    """The evaluation metric to monitor. Example: ``"validation/loss"``."""
    mode: Literal["min", "max"]
    """``min``: lower is better. ``max``: higher is better."""
    patience: PositiveInt
    """Number of consecutive evaluations without improvement after which training ends. Example:
    ``5``."""
    min_delta: NonNegativeFloat = 0.0
    """Minimum improvement: a value counts as better only if it improves on the best value by more
    than this."""


class Stop(Spec):
    """When training ends. Set exactly one of ``epochs``, ``steps`` and ``seconds``."""

    epochs: int | None = Constraint(default=None, ge=1, le=1_000_000)
    """Number of epochs. Example: ``10``."""
    steps: int | None = Constraint(default=None, ge=1, le=1_000_000_000)
    """Number of optimizer updates. Example: ``5000``."""
    seconds: PositiveFloat | None = None
    """Training time in seconds. Training stops at the next step boundary after it. Example:
    ``3600``."""
    early: Early | None = None
    """Ends training earlier if a metric stops improving. Requires ``evaluate``."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        check_exactly_one(self, "epochs", "steps", "seconds")
        return self


class Evaluate(Spec):
    """When to evaluate the validation data. Set exactly one of the two intervals.

    Each evaluation reads all sources of ``data.validation``, in order. The end of training is
    always evaluated. ``validation/loss`` does not depend on ``data.batch_size``: it is the loss of
    all rows as one batch. It is the sum of the batches' numerators divided by the sum of the
    denominators of torch's mean (rows, sequence steps without padding, or the weights of the
    targets that are not ignored).
    """

    every_epochs: PositiveInt | None = None
    """Interval in epochs. Example: ``1``."""
    every_steps: PositiveInt | None = None
    """Interval in steps. Example: ``500``."""
    samples: int = Constraint(default=0, ge=0, le=1000)
    """Number of validation rows whose outputs and targets each evaluation stores, as the artifact
    ``samples-<step>.safetensors``. The rows are evenly spaced and the same in every evaluation. Of
    several sources, they are rows of the first. Example: ``8``."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        check_exactly_one(self, "every_epochs", "every_steps")
        return self


class KeepBest(Spec):
    """Keeps the checkpoints with the best values of a metric."""

    metric: str = Constraint(min_length=1, max_length=300)
    """A metric of the job; a checkpoint is ranked by the newest value when it was saved. Example:
    ``"validation/accuracy"``."""
    mode: Literal["min", "max"]
    """``min``: lower is better. ``max``: higher is better."""
    count: int = Constraint(default=1, ge=1, le=100)
    """Number of checkpoints to keep."""


class Checkpoint(Spec):
    """When the training state is saved, and which checkpoints are kept.

    The end of training is always saved. If neither ``every_epochs`` nor ``every_steps`` is set, a
    checkpoint is saved at the end of each epoch and after each evaluation with a new best value, as
    long as checkpoints take at most 5 % of the time. If the best state is not saved because of this
    limit, it is held in memory and written before the next checkpoint.
    """

    every_epochs: PositiveInt | None = None
    """Interval in epochs. Not together with ``every_steps``. Example: ``1``."""
    every_steps: PositiveInt | None = None
    """Interval in steps. Not together with ``every_epochs``. Example: ``1000``."""
    every_s: PositiveFloat | None = 300
    """Additionally save when this many seconds have passed since the last checkpoint; null:
    never."""
    keep_last: PositiveInt = 3
    """Number of newest checkpoints to keep. Older ones are deleted when a newer one is complete."""
    keep_best: KeepBest | None = None
    """Which checkpoints to keep in addition to the last ones. Default: the best one by the metric
    of ``stop.early``, else by the lowest ``validation/loss``, of several sources that of the first;
    without evaluations, none. null: keep only the last ones."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        check_at_most_one(self, "every_epochs", "every_steps")
        return self

    @property
    def is_named(self) -> bool:
        """Whether an interval in epochs or steps is set."""
        return self.every_epochs is not None or self.every_steps is not None

    @property
    def may_hold(self) -> bool:
        """Whether the best state can be held in memory while another one is written."""
        return self.keep_best is not None and not self.is_named
