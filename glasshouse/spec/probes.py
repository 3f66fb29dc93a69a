"""What to watch inside the network, and when."""

from typing import Annotated, Literal, Self

from pydantic import Field as Constraint
from pydantic import NonNegativeInt, PositiveInt, model_validator

from glasshouse.slices import MAX_CHARACTERS, read
from glasshouse.spec.strict import Spec

Form = Literal["stats", "histogram", "quantiles", "full", "sample"]
SAMPLE_BYTES = 65_536
"""What ``sample`` keeps of one tensor where ``max_bytes`` is left out."""
TensorKind = Literal["output", "output_grad", "param", "param_grad"]
Glob = Annotated[str, Constraint(pattern=r"^[A-Za-z0-9_.*?\[\]!-]{1,128}$")]


class Probe(Spec):
    """Looks at tensors of the layers it matches, on the steps it is due."""

    layers: tuple[Glob, ...] = Constraint(min_length=1, max_length=1000)
    """Globs over layer names, and over parameter names (``conv1.weight``)."""
    kinds: tuple[TensorKind, ...] = Constraint(min_length=1, max_length=8)
    """Which tensors. For ``param`` and ``param_grad`` a layer means all its parameters."""
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
    want: tuple[Form, ...] = Constraint(default=("stats",), min_length=1, max_length=5)
    """``stats``: one row of figures. ``histogram``: counts in bins that all tensors share.
    ``quantiles``: p01, p05, p25, p50, p75, p95 and p99, from the histogram. ``full``: the whole
    tensor, in its own dtype. ``sample``: evenly spaced entries of its first axis."""
    slice: str | None = Constraint(default=None, min_length=1, max_length=MAX_CHARACTERS)
    """The part of a tensor that ``full`` keeps, as numpy writes it: ``0:4,:,::2``."""
    max_bytes: PositiveInt | None = None
    """Bytes that ``full`` or ``sample`` may keep of one tensor. Left out, ``full`` has no limit of
    its own, and ``sample`` takes 65536."""

    @model_validator(mode="after")
    def _check_when(self) -> Self:
        if (self.every is None) == (self.at is None):
            raise ValueError("give exactly one of every, at")
        if self.stop is not None and self.stop <= self.start:
            raise ValueError("stop must be greater than start")
        return self

    @model_validator(mode="after")
    def _check_forms(self) -> Self:
        if self.slice is not None:
            if "full" not in self.want:
                raise ValueError("slice is the part that full keeps: want full, or leave it out")
            read(self.slice)
        if self.max_bytes is not None and not {"full", "sample"} & {*self.want}:
            raise ValueError("max_bytes limits full and sample: want one, or leave it out")
        return self
