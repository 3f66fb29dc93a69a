"""Probes: which tensors to record, when, and in which form."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field as Constraint
from pydantic import NonNegativeInt, PositiveInt, field_validator, model_validator

from glasshouse.slices import MAX_CHARACTERS, read
from glasshouse.spec.parallel import MAX_PROCESSES
from glasshouse.spec.strict import Spec, WrongAt, check_exactly_one, repeated
from glasshouse.spec.tensor_kinds import TensorKind

Form = Literal["stats", "histogram", "quantiles", "full", "sample"]
SAMPLE_BYTES = 65_536
"""The default of ``max_bytes`` for ``sample``."""
MAX_FULL_BYTES = 256 * 2**20
"""Maximum size of the whole tensors that all probes of a job capture in one step."""
DEFAULT_MAX_OVERHEAD = 0.03
Rank = Annotated[int, Constraint(ge=0, lt=MAX_PROCESSES)]
Glob = Annotated[str, Constraint(pattern=r"^[A-Za-z0-9_.:*?\[\]!-]{1,128}$")]


class Probe(Spec):
    """Records tensors of the layers that it matches, on the steps on which it is due.

    Set exactly one of ``every``, ``at`` and ``on``.
    """

    layers: tuple[Glob, ...] = Constraint(min_length=1, max_length=1000)
    """Globs of layer names and parameter names (``conv1.weight``). Globs with a dot also match
    submodules (``block0.linear1``). Example: ``["conv*", "fc"]``."""
    kinds: tuple[TensorKind, ...] = Constraint(min_length=1, max_length=8)
    """Which tensors to record. For ``param``, ``param_grad`` and ``update``, a layer means all of
    its parameters; for ``optim_state``, all optimizer state of these parameters. Example:
    ``["output", "output_grad"]``."""
    every: PositiveInt | None = None
    """Interval in steps: due on step 0 and on every n-th step after it. Example: ``25``."""
    at: tuple[NonNegativeInt, ...] | None = Constraint(
        default=None, min_length=1, max_length=100_000
    )
    """Due on exactly these steps. Example: ``[0, 100, 1000]``."""
    on: Literal["nonfinite"] | None = None
    """``nonfinite``: the flight recorder. It computes statistics on every step and keeps them in
    memory. If a watched tensor or the loss is NaN or Inf, it reports the last 20 steps and the bad
    one."""
    phase: Literal["train", "evaluate"] = "train"
    """``train``: record training steps. ``evaluate``: record the first batch of evaluations;
    ``every`` then counts evaluations, and ``at`` lists the steps after which they run."""
    max_overhead: float | None = Constraint(default=DEFAULT_MAX_OVERHEAD, gt=0, le=1)
    """Maximum cost of all probes of the job together, as a fraction of step time. While they cost
    more, the interval of this probe grows automatically. It applies to ``every`` and ``on`` in
    training. null: keep the interval."""
    start: NonNegativeInt = 0
    """First step on which the probe can be due."""
    stop: PositiveInt | None = None
    """First step on which the probe is no longer due. Default: the probe has no end. Example:
    ``1000``."""
    want: tuple[Form, ...] = Constraint(default=("stats",), min_length=1, max_length=5)
    """Forms in which to record a tensor. ``stats``: one row of statistics. ``histogram``: counts in
    bins that are the same for all tensors. ``quantiles``: p01, p05, p25, p50, p75, p95 and p99,
    from the histogram. ``full``: the whole tensor in its own dtype. ``sample``: evenly spaced
    entries of the first axis. Example: ``["stats", "full"]``."""
    slice: str | None = Constraint(default=None, min_length=1, max_length=MAX_CHARACTERS)
    """The part of the tensor that ``full`` records, in numpy's syntax. Default: all of it. Example:
    ``"0:4,:,::2"``."""
    max_bytes: PositiveInt | None = None
    """Maximum size in bytes of one tensor in ``full`` or ``sample``. Default: no limit for
    ``full``, 65536 for ``sample``. Example: ``1048576``."""
    point: Literal["raw", "clipped"] = "raw"
    """When to record ``param_grad``: ``raw`` after the backward pass, ``clipped`` before the
    update. Without ``grad_clip`` they are the same."""
    lossless: bool = False
    """``true``: training waits until there is room for ``full`` and ``sample`` tensors instead of
    dropping them. The interval of the probe is not changed automatically."""
    ranks: Literal["merged", "all"] | tuple[Rank, ...] = "merged"
    """The processes of a job with several whose own values are recorded too. The values of all
    processes, merged, are always recorded. ``merged``: only those. ``all``: also those of each
    process. A list: also those of these ranks. Example: ``[0, 3]``."""

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
            detail = (
                "on applies to training only, and phase is 'evaluate': remove phase, or set every"
            )
            raise WrongAt("phase", detail=f"{detail} or at instead of on")
        if self.on is not None:
            _check_recorder(self.want)
        if (self.at is not None or self.phase == "evaluate") and self.max_overhead not in (
            None,
            DEFAULT_MAX_OVERHEAD,
        ):
            what = "at" if self.at is not None else "phase evaluate"
            detail = f"max_overhead ({self.max_overhead}) needs an interval, and {what} has none"
            raise WrongAt("max_overhead", detail=f"{detail}: remove max_overhead")
        if self.lossless and self.max_overhead not in (None, DEFAULT_MAX_OVERHEAD):
            detail = f"max_overhead ({self.max_overhead}) has no effect with lossless: remove one"
            raise WrongAt("max_overhead", detail=detail)
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if self.ranks == ():
            detail = 'ranks is an empty list: list the ranks, or set ranks to "merged" or "all"'
            raise WrongAt("ranks", detail=detail)
        if not isinstance(self.ranks, str) and (again := repeated(self.ranks)) is not None:
            detail = f"rank {self.ranks[again]} is listed twice: remove one of them"
            raise WrongAt("ranks", again, detail=detail)
        if self.on is not None and self.ranks != "merged":
            detail = "on keeps the merged values of all processes, and ranks is"
            detail += f" {_shown(self.ranks)}: remove ranks, or set every or at instead of on"
            raise WrongAt("ranks", detail=detail)
        return self

    def check_processes(self, num: int, *place: int | str) -> None:
        """Check ``ranks`` against the number of processes of the job.

        Args:
            num: the number of processes.
            place: the path of the probe, for the error.

        Raises:
            WrongAt: the job does not have one of the ranks, or has one process.
        """
        if self.ranks == "merged":
            return
        if num == 1:
            detail = f"ranks is {_shown(self.ranks)}, and the job has one process, whose values are"
            detail += " the merged ones: remove ranks, or set parallel.processes"
            raise WrongAt(*place, "ranks", detail=detail)
        for number, rank in enumerate(self.own_ranks(num)):
            if rank >= num:
                detail = f"the job has no rank {rank}: it has {num} processes, with the ranks 0 to"
                raise WrongAt(*place, "ranks", number, detail=f"{detail} {num - 1}")

    def own_ranks(self, num: int) -> Sequence[int]:
        """Return the ranks whose own values are recorded, of a job with ``num`` processes."""
        if self.ranks == "merged":
            return ()
        return range(num) if self.ranks == "all" else self.ranks

    @model_validator(mode="after")
    def _check_forms(self) -> Self:
        if self.slice is not None and "full" not in self.want:
            detail = "slice applies to full only: add full to want, or remove slice"
            raise WrongAt("slice", detail=detail)
        if not {"full", "sample"} & {*self.want}:
            if self.max_bytes is not None:
                detail = (
                    f"max_bytes ({self.max_bytes}) applies to full and sample: add one of them to"
                )
                raise WrongAt("max_bytes", detail=f"{detail} want, or remove max_bytes")
            if self.lossless:
                detail = "lossless (true) applies to full and sample: add one of them to want, or"
                raise WrongAt("lossless", detail=f"{detail} remove lossless")
        return self


def _shown(ranks: str | tuple[int, ...]) -> str:
    return f"'{ranks}'" if isinstance(ranks, str) else str([*ranks])


def _check_recorder(want: tuple[Form, ...]) -> None:
    if "stats" not in want:
        raise WrongAt("want", detail=f"on records statistics, and want is {[*want]}: add stats")
    for number, form in enumerate(want):
        if form in ("histogram", "quantiles"):
            detail = f"on records statistics and tensors only: remove {form} from want"
            raise WrongAt("want", number, detail=detail)
