"""What to watch inside the network, and when."""

from typing import Annotated, Literal, Self

from pydantic import Field as Constraint
from pydantic import NonNegativeInt, PositiveInt, field_validator, model_validator

from glasshouse.slices import MAX_CHARACTERS, read
from glasshouse.spec.strict import Spec, WrongAt, check_exactly_one

Form = Literal["stats", "histogram", "quantiles", "full", "sample"]
SAMPLE_BYTES = 65_536
"""What ``sample`` keeps of one tensor where ``max_bytes`` is left out."""
TensorKind = Literal[
    "output", "input", "output_grad", "param", "param_grad", "update", "optim_state"
]
MAX_FULL_BYTES = 256 * 2**20
"""Whole tensors that one step may capture, of all probes of a job together."""
DEFAULT_MAX_OVERHEAD = 0.03
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
    on: Literal["nonfinite"] | None = None
    """``nonfinite``: it looks at every step and says nothing, until a tensor that it watches, or
    the loss, is not finite; then come the last 20 steps and the bad one."""
    phase: Literal["train", "evaluate"] = "train"
    """``evaluate``: it looks at the first batch of evaluations. ``every`` counts those, from the
    first; ``at`` names the steps after which they run."""
    max_overhead: float | None = Constraint(default=DEFAULT_MAX_OVERHEAD, gt=0, le=1)
    """While all watching together takes a larger fraction of step time than this, the probe's
    interval widens by itself; null keeps it. Of use to ``every`` and ``on`` while training."""
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
    point: Literal["raw", "clipped"] = "raw"
    """Where ``param_grad`` is taken: ``raw`` after the backward pass, ``clipped`` before the
    update. Without ``grad_clip`` both are the same."""
    lossless: bool = False
    """Training waits for room for the tensors, and says how long, instead of dropping them. Its
    interval is never widened."""

    @field_validator("slice")
    @classmethod
    def _check_slice(cls, text: str | None) -> str | None:
        if text is not None:
            read(text)
        return text

    @model_validator(mode="after")
    def _check_when(self) -> Self:
        check_exactly_one(self, "every", "at", "on")
        if self.stop is not None and self.stop <= self.start:
            detail = f"stop ({self.stop}) must be greater than start ({self.start})"
            raise WrongAt("stop", detail=detail)
        if self.on is not None and self.phase == "evaluate":
            detail = "on watches training, and phase is 'evaluate': remove phase, or replace on by"
            raise WrongAt("phase", detail=f"{detail} every or at")
        if self.on is not None:
            _check_recorder(self.want)
        if (self.at is not None or self.phase == "evaluate") and self.max_overhead not in (
            None,
            DEFAULT_MAX_OVERHEAD,
        ):
            what = "at" if self.at is not None else "phase evaluate"
            detail = f"max_overhead ({self.max_overhead}) widens intervals, and {what} has none"
            raise WrongAt("max_overhead", detail=f"{detail}: remove max_overhead")
        if self.lossless and self.max_overhead not in (None, DEFAULT_MAX_OVERHEAD):
            detail = f"max_overhead ({self.max_overhead}) has no effect with lossless: remove one"
            raise WrongAt("max_overhead", detail=detail)
        return self

    @model_validator(mode="after")
    def _check_forms(self) -> Self:
        if self.slice is not None and "full" not in self.want:
            detail = "slice is the part that full keeps: want full, or leave it out"
            raise WrongAt("slice", detail=detail)
        if not {"full", "sample"} & {*self.want}:
            if self.max_bytes is not None:
                detail = f"max_bytes ({self.max_bytes}) limits full and sample: add one of them to"
                raise WrongAt("max_bytes", detail=f"{detail} want, or remove max_bytes")
            if self.lossless:
                detail = "lossless (true) applies to full and sample: add one of them to want, or"
                raise WrongAt("lossless", detail=f"{detail} remove lossless")
        return self


def _check_recorder(want: tuple[Form, ...]) -> None:
    if "stats" not in want:
        raise WrongAt("want", detail=f"on records statistics, and want is {[*want]}: add stats")
    for number, form in enumerate(want):
        if form in ("histogram", "quantiles"):
            detail = f"on records statistics and tensors only: remove {form} from want"
            raise WrongAt("want", number, detail=detail)
