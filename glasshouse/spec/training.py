"""How a network is trained: loss, optimizer, when to stop, evaluate and save."""

from typing import Literal, Self

from pydantic import Field as Constraint
from pydantic import PositiveFloat, PositiveInt, model_validator

from glasshouse.spec.network import Input
from glasshouse.spec.strict import Args, Spec, TorchName


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
            raise ValueError("missing is of load model only: all goes on with the whole run")
        return self


class Loss(Spec):
    """A torch.nn loss, by torch's name and arguments."""

    type: TorchName
    args: Args = {}
    inputs: tuple[Input, ...] = Constraint(min_length=1, max_length=8)
    """What it compares, in the order of the loss's own arguments: layers or data fields."""


class Optimizer(Spec):
    """A torch.optim optimizer, by torch's name and arguments."""

    type: TorchName
    args: Args = {}


class GradClip(Spec):
    """Gradients are made smaller between the backward pass and the update."""

    type: Literal["value", "norm", "global_norm"]
    """``value``: each element to [-max, max]. ``norm``: each parameter's gradient to an l2 norm of
    at most max. ``global_norm``: all gradients together; the norm before is the metric
    ``grad_norm``."""
    max: PositiveFloat


class Stop(Spec):
    """When training ends. Exactly one of the three."""

    epochs: int | None = Constraint(default=None, ge=1, le=1_000_000)
    steps: int | None = Constraint(default=None, ge=1, le=1_000_000_000)
    seconds: PositiveFloat | None = None
    """Training stops at the first step boundary after this many seconds of training."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        given = [name for name in ("epochs", "steps", "seconds") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("give exactly one of epochs, steps, seconds")
        return self


class Evaluate(Spec):
    """When the validation data is run. It is always run once more at the end."""

    every_epochs: PositiveInt | None = None
    every_steps: PositiveInt | None = None
    samples: int = Constraint(default=0, ge=0, le=1000)
    """Validation rows, evenly spaced and always the same, whose outputs and targets each evaluation
    keeps: the artifact ``samples-<step>.safetensors``."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.every_epochs is None) == (self.every_steps is None):
            raise ValueError("give exactly one of every_epochs, every_steps")
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

    Neither ``every_epochs`` nor ``every_steps``: at the end of every epoch, or of fewer where they
    are so short that writing would take more than a twentieth of the time.
    """

    every_epochs: PositiveInt | None = None
    every_steps: PositiveInt | None = None
    every_s: PositiveFloat | None = 300
    """Also when so many seconds have passed since the last one; null: never by time."""
    keep_last: PositiveInt = 3
    """Older ones are deleted once a newer one is complete."""
    keep_best: KeepBest | None = None
    """These are kept beside the last ones."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if self.every_epochs is not None and self.every_steps is not None:
            raise ValueError("give every_epochs or every_steps, not both")
        return self
