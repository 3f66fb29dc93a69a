"""What to watch inside the network, and when."""

from typing import Annotated, Literal, Self

from pydantic import Field as Constraint
from pydantic import NonNegativeInt, PositiveInt, model_validator

from glasshouse.spec.strict import Spec

TensorKind = Literal[
    "output", "input", "output_grad", "param", "param_grad", "update", "optim_state"
]
Glob = Annotated[str, Constraint(pattern=r"^[A-Za-z0-9_.:*?\[\]!-]{1,128}$")]


class Probe(Spec):
    """Looks at tensors of the layers it matches, on the steps it is due."""

    layers: tuple[Glob, ...] = Constraint(min_length=1, max_length=1000)
    """Globs over layer names, and over parameter names (``conv1.weight``). One with a dot also
    looks inside layers that are built of others (``block0.linear1``)."""
    kinds: tuple[TensorKind, ...] = Constraint(min_length=1, max_length=8)
    """Which tensors. For kinds of parameters a layer means all its parameters, and for
    ``optim_state`` all that the optimizer keeps of them."""
    every: PositiveInt | None = None
    """Due on step 0 and on every n-th step after it."""
    at: tuple[NonNegativeInt, ...] | None = Constraint(
        default=None, min_length=1, max_length=100_000
    )
    """Due on exactly these steps."""
    start: NonNegativeInt = 0
    """First step on which it may be due."""
    stop: PositiveInt | None = None
    """First step on which it is due no more."""
    want: tuple[Literal["stats", "full"], ...] = Constraint(
        default=("stats",), min_length=1, max_length=2
    )
    """``stats``: one row of figures. ``full``: the whole tensor, in its own dtype."""

    point: Literal["raw", "clipped"] = "raw"
    """Where ``param_grad`` is taken: ``raw`` after the backward pass, ``clipped`` before the
    update. Without ``grad_clip`` both are the same."""

    @model_validator(mode="after")
    def _check_when(self) -> Self:
        if (self.every is None) == (self.at is None):
            raise ValueError("give exactly one of every, at")
        if self.stop is not None and self.stop <= self.start:
            raise ValueError("stop must be greater than start")
        return self
