"""What a probe matches: globs over layers, their leaves and parameters, checked before training.

Works on names and kinds; knows nothing of hooks or tensors' values.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Literal

from engine.core.problems import Findings
from engine.core.tensor_names import root
from glasshouse.spec import Probe, TrainJob
from glasshouse.spec.tensor_kinds import OF_LAYERS

Scope = Literal["layer", "inner", "parameter", "loss"]
LOSS = "loss"
LOSS_SAMPLES = "loss.samples"
LOSS_ROWS = "loss.rows"
_OF_EVALUATIONS = ("output", "input", "param")


Layout = tuple[tuple[int, ...], int]
"""The shape of a tensor, and the bytes of one item."""


@dataclass(frozen=True)
class NamedTensor:
    """A tensor with a name and a kind."""

    size: int
    """In bytes."""
    owner: str
    """The layer, inner module or parameter that it belongs to, whose name also matches it."""
    is_first: bool = True
    scope: Scope = "layer"
    lacks: str = ""
    """Why it cannot be watched; empty if it can."""
    layout: Layout | None = None
    """None: not known before training."""


def means(
    glob: str, name: str, *, owner: str, is_first: bool = True, scope: Scope = "layer"
) -> bool:
    """Return whether a glob names a tensor.

    A layer's own name means its first leaf, and everything of all its parameters. Tensors inside a
    layer are matched only by globs with a dot, and the loss only by its name.
    """
    if scope == "parameter":  # conv1.weight and its optimizer state belong to conv1
        prefixes = accumulate(name.split("."), "{}.{}".format)
        return any(fnmatchcase(prefix, glob) for prefix in prefixes)
    if scope == "inner" and "." not in glob:
        return False
    if scope == "loss":
        return glob.startswith(LOSS) and fnmatchcase(name, glob)
    return fnmatchcase(name, glob) or (is_first and fnmatchcase(owner, glob))


def may_match(probe: Probe, module: str, scope: Scope = "layer") -> bool:
    """Return whether a probe could match some leaf of a module, whatever leaves it has."""
    for glob in probe.layers:
        if scope == "inner" and "." not in glob:
            continue
        if fnmatchcase(module, glob):
            return True
        literal = re.split(r"[*?[]", glob, maxsplit=1)[0]
        # After the module's own name comes a dot, or a colon before the number of a call.
        begins = module.startswith(literal) or literal.startswith((f"{module}.", f"{module}:"))
        if begins and (literal != glob or "." in glob):
            return True
    return False


@dataclass(frozen=True)
class Watchable:
    """Everything in a network that can be watched."""

    things: Mapping[str, Mapping[str, NamedTensor]]
    """By kind and name."""
    silent: Mapping[str, str] = field(default_factory=dict[str, str])
    """Inner modules that no step calls, and why there is nothing to watch."""
    closed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Layers that hide their inner modules, and how to open them."""
    without: Mapping[str, str] = field(default_factory=dict[str, str])
    """Kinds that no tensor has, and why."""
    _known: dict[tuple[str, str], list[str]] = field(default_factory=dict, repr=False)

    def with_gradient(self) -> set[str]:
        """Return the leaves and the parameters whose gradients can be watched."""
        graded = [self.things[kind] for kind in ("output_grad", "param_grad")]
        return {name for things in graded for name, thing in things.items() if not thing.lacks}

    def matched(self, globs: Sequence[str], kind: str) -> dict[str, NamedTensor]:
        """Return the tensors of a kind that some globs name, whether they can be watched or not."""
        named = [self._named(glob, kind) for glob in globs]
        things = self.things.get(kind, {})
        if len(named) == 1:
            return {name: things[name] for name in named[0]}
        every = {name for names in named for name in names}
        return {name: thing for name, thing in things.items() if name in every}

    def _named(self, glob: str, kind: str) -> list[str]:
        known = self._known.get((glob, kind))
        if known is None:
            known = [
                name
                for name, thing in self.things.get(kind, {}).items()
                if means(glob, name, owner=thing.owner, is_first=thing.is_first, scope=thing.scope)
            ]
            self._known[glob, kind] = known
        return known

    def thing(self, seen: str) -> NamedTensor:
        """Return the tensor of a ``name/kind`` from ``select``."""
        name, _, kind = seen.rpartition("/")
        return self.things[kind][name]

    @property
    def layers(self) -> list[str]:
        """Return the names of the layers, in order."""
        outputs = self.things.get("output", {})
        return list(
            dict.fromkeys(root(n) for n, thing in outputs.items() if thing.scope == "layer")
        )


def select(probe: Probe, number: int, watchable: Watchable, findings: Findings) -> dict[str, int]:
    """Return what a probe will watch, as ``name/kind`` with bytes; the rest becomes findings."""
    pointer = f"/probes/{number}"
    before = len(findings.problems)
    for position, glob in enumerate(probe.layers):
        _check_glob(f"{pointer}/layers/{position}", glob, probe.kinds, watchable, findings)
    seen: dict[str, int] = {}
    for position, kind in enumerate(probe.kinds):
        wanted = watchable.matched(probe.layers, kind)
        if probe.phase == "evaluate":  # its loss is a metric, over all batches
            wanted = {name: item for name, item in wanted.items() if item.scope != "loss"}
        seen.update(
            {f"{name}/{kind}": item.size for name, item in wanted.items() if not item.lacks}
        )
        if wanted or len(findings.problems) == before:  # otherwise its globs have given the reason
            _check_kind(f"{pointer}/kinds/{position}", kind, wanted, watchable, findings)
    return seen


class GradientPoints:
    """Checks that a parameter's gradient is taken at one point: it is stored under one name."""

    def __init__(self, spec: TrainJob) -> None:
        self._clips = spec.clips
        self._taken: dict[str, tuple[str, int]] = {}

    def check(self, probe: Probe, number: int, seen: Iterable[str], findings: Findings) -> None:
        """Compare a probe with the earlier ones."""
        if not self._clips:
            return
        for name in seen:
            if not name.endswith("/param_grad"):
                continue
            point, other = self._taken.setdefault(name, (probe.point, number))
            if point != probe.point:
                detail = f"the gradient of {name.rpartition('/')[0]} is taken {point} by probe"
                detail += f" {other}, and a job keeps one of the two: watch it at one point"
                findings.problem(f"/probes/{number}/point", detail, "two_points")
                return


def check_loss_name(spec: TrainJob, findings: Findings) -> None:
    """Warn that probes named ``loss`` match a layer of that name."""
    for position, layer in enumerate(spec.network.layers):
        if layer.name == LOSS and any(
            glob.startswith(LOSS) for probe in spec.probes for glob in probe.layers
        ):
            detail = "probes of 'loss' see this layer; the job's loss is watched by that name only"
            detail += " where no layer and no data field has it"
            findings.warn(f"/network/layers/{position}/name", detail, "loss_name")


def check_phase(job: TrainJob, number: int, findings: Findings) -> None:
    """Add findings for what a probe of evaluations asks for and cannot have."""
    probe = job.probes[number]
    if probe.phase != "evaluate":
        return
    pointer = f"/probes/{number}"
    if job.evaluate is None or job.data.validation is None:
        detail = "the job has no evaluations to look at: give it evaluate and data.validation"
        findings.problem(f"{pointer}/phase", detail, "no_evaluations")
    names = [layer.name for layer in job.network.layers]
    first = next(iter(job.data.validations), "validation")
    for position, glob in enumerate(probe.layers):
        if glob.startswith(LOSS) and not any(fnmatchcase(name, glob) for name in names):
            detail = "the loss of an evaluation is over all its batches: it is the metric"
            findings.problem(f"{pointer}/layers/{position}", f"{detail} {first}/loss", "no_kind")
    for position, kind in enumerate(probe.kinds):
        if kind not in _OF_EVALUATIONS:
            detail = f"an evaluation computes no gradient and no update, so it has no {kind};"
            detail += f" it has: {', '.join(_OF_EVALUATIONS)}"
            findings.problem(f"{pointer}/kinds/{position}", detail, "no_kind")


def _check_kind(
    pointer: str,
    kind: str,
    wanted: Mapping[str, NamedTensor],
    watchable: Watchable,
    findings: Findings,
) -> None:
    if not wanted:
        reason = watchable.without.get(kind)
        if reason is None:
            what = "output" if kind in OF_LAYERS else "parameters"
            reason = f"the layers it names have no {what}"
        findings.problem(pointer, f"{reason}, so no {kind}", "no_kind")
        return
    lacking = {name: item.lacks for name, item in wanted.items() if item.lacks}
    all_lack = len(lacking) == len(wanted)
    for reason in dict.fromkeys(lacking.values()):
        names = _listed(name for name, why in lacking.items() if why == reason)
        detail = reason.format(names)
        if all_lack:
            findings.problem(pointer, f"{detail}, so there is no {kind}", "no_gradient")
        else:
            findings.warn(pointer, f"{detail}: no {kind} of those will be seen", "no_gradient")


def _check_glob(
    pointer: str, glob: str, kinds: Sequence[str], watchable: Watchable, findings: Findings
) -> None:
    silent = [name for name in watchable.silent if fnmatchcase(name, glob) and "." in glob]
    inside = watchable.closed.get(root(glob)) if "." in glob else None
    if any(watchable.matched([glob], kind) for kind in kinds):
        if {*kinds} & {*OF_LAYERS}:
            _warn_of_silent(pointer, silent, watchable, findings)
    elif silent and {*kinds} & {*OF_LAYERS}:
        detail = f"{_listed(silent)}: {watchable.silent[silent[0]]}"
        findings.problem(pointer, detail, "never_called")
    elif any(watchable.matched([glob], kind) for kind in watchable.things):
        detail = f"what {glob!r} names has no {' or '.join(kinds)}"
        findings.warn(pointer, detail, "no_kind")
    elif inside is not None:
        findings.problem(pointer, f"there is no {glob!r}: {inside}", "closed")
    else:
        listed = ", ".join(watchable.layers[:30])
        detail = f"{glob!r} matches no layer or parameter; the layers are: {listed}"
        findings.problem(pointer, detail, "no_match")


def _warn_of_silent(
    pointer: str, silent: Sequence[str], watchable: Watchable, findings: Findings
) -> None:
    for reason in dict.fromkeys(watchable.silent[name] for name in silent):
        names = _listed(name for name in silent if watchable.silent[name] == reason)
        findings.warn(pointer, f"{names} will not be seen: {reason}", "never_called")


def _listed(names: Iterable[str]) -> str:
    some = list(names)
    return ", ".join(some[:10]) + (f" and {len(some) - 10} more" if len(some) > 10 else "")
