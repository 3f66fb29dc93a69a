"""What a probe matches: globs over layers, their leaves and parameters, checked before training.

Names and kinds only; knows nothing of hooks or tensors' values.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from engine.network import root
from engine.problems import Findings
from glasshouse.spec import Probe

OF_OUTPUTS = ("output", "output_grad")


def matches(probe: Probe, name: str, *, is_first: bool = True) -> bool:
    """Whether a probe's globs name a leaf or a parameter.

    A layer's own name means its first leaf, and all of its parameters.
    """
    own = root(name)
    return any(
        fnmatchcase(name, glob) or (is_first and fnmatchcase(own, glob)) for glob in probe.layers
    )


def may_match(probe: Probe, layer: str) -> bool:
    """Whether a probe could match some leaf of a layer, whatever leaves it turns out to have."""
    return any(
        fnmatchcase(layer, glob)
        or fnmatchcase(layer, root(glob))
        or fnmatchcase(f"{layer}.0", glob)
        for glob in probe.layers
    )


def is_due(probe: Probe, step: int) -> bool:
    """Whether a probe looks at a step."""
    if step < probe.start or (probe.stop is not None and step >= probe.stop):
        return False
    if probe.at is not None:
        return step in _steps(probe)
    return probe.every is not None and step % probe.every == 0


_at_steps: dict[tuple[int, ...], frozenset[int]] = {}


def _steps(probe: Probe) -> frozenset[int]:
    at = probe.at or ()
    if at not in _at_steps:
        _at_steps[at] = frozenset(at)
    return _at_steps[at]


@dataclass(frozen=True)
class Watchable:
    """Everything of one network that can be watched: names with their sizes in bytes."""

    leaves: Mapping[str, int]
    """Layer outputs: ``conv1``, ``lstm.0`` …."""
    parameters: Mapping[str, int]
    with_gradient: Collection[str]
    """Those leaves and parameters that the loss sends a gradient to."""

    def names(self, kind: str) -> Mapping[str, int]:
        """What has this kind of tensor."""
        every = self.leaves if kind in OF_OUTPUTS else self.parameters
        if not kind.endswith("_grad"):
            return every
        return {name: size for name, size in every.items() if name in self.with_gradient}

    def is_first(self, name: str) -> bool:
        """Whether a name is a parameter or its layer's first leaf."""
        if name in self.parameters:
            return True
        return next(leaf for leaf in self.leaves if root(leaf) == root(name)) == name


def select(probe: Probe, number: int, watchable: Watchable, findings: Findings) -> dict[str, int]:
    """What a probe will see, as ``name/kind`` with bytes; what it cannot see is noted."""
    pointer = f"/probes/{number}"
    seen: dict[str, int] = {}
    firsts = {
        name for name in [*watchable.leaves, *watchable.parameters] if watchable.is_first(name)
    }
    for position, kind in enumerate(probe.kinds):
        candidates = watchable.leaves if kind in OF_OUTPUTS else watchable.parameters
        wanted = [name for name in candidates if matches(probe, name, is_first=name in firsts)]
        has = watchable.names(kind)
        seen.update({f"{name}/{kind}": has[name] for name in wanted if name in has})
        _check_kind(f"{pointer}/kinds/{position}", kind, wanted, has, findings)
    _check_globs(probe, pointer, watchable, findings)
    return seen


def _check_kind(
    pointer: str, kind: str, wanted: Sequence[str], has: Mapping[str, int], findings: Findings
) -> None:
    without = [name for name in wanted if name not in has]
    if not wanted:
        what = "output" if kind in OF_OUTPUTS else "parameters"
        findings.problem(pointer, f"the layers it names have no {what}, so no {kind}", "no_kind")
    elif len(without) == len(wanted):
        detail = f"no gradient reaches {', '.join(without[:10])}, so there is no {kind}"
        findings.problem(pointer, detail, "no_gradient")
    elif without:
        detail = f"no gradient reaches {', '.join(without[:10])}: no {kind} of those will be seen"
        findings.warn(pointer, detail, "no_gradient")


def _check_globs(probe: Probe, pointer: str, watchable: Watchable, findings: Findings) -> None:
    names = {*watchable.leaves, *watchable.parameters}
    names |= {root(name) for name in names}
    for position, glob in enumerate(probe.layers):
        if not any(fnmatchcase(name, glob) for name in names):
            listed = ", ".join(list(dict.fromkeys(root(name) for name in watchable.leaves))[:30])
            detail = f"{glob!r} matches no layer or parameter; the layers are: {listed}"
            findings.problem(f"{pointer}/layers/{position}", detail, "no_match")
