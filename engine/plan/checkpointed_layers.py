"""Activation checkpointing: check the boundaries of a spec, or choose those with least memory.

Counted on a forward pass without data, on torch's meta device. Knows torch and jobs.
"""

import contextlib
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from engine.core.problems import Findings
from engine.core.tensor_names import leaves
from engine.network.network import Network
from glasshouse.spec import Graph, Layer, TrainJob

AT = "/activation_checkpointing"
_MOST_PARTS = 64


def settle_kept(
    spec: TrainJob,
    wanted: Sequence[str],
    make_batch: Callable[[], dict[str, Tensor]],
    findings: Findings,
) -> TrainJob:
    """Return the job with its activation checkpoint boundaries: the spec's, or chosen ones.

    Raises:
        SpecProblems: names that are no layers or not in their order, layers that cannot run twice,
            or layers that work in place on the output of another segment.
    """
    asked = spec.activation_checkpointing
    if asked is None:
        return spec
    names = [layer.name for layer in spec.network.layers]
    if asked is not True:
        _check_order(asked, names, findings)
        findings.stop()
    first, last = (0, len(names)) if asked is True else map(names.index, (asked[0], asked[-1]))
    _check_once(spec.network.layers[first:last], findings)
    findings.stop()
    counts = _counted(spec.network, wanted, make_batch)
    if asked is not True:
        _check_overwritten(asked, names, counts, findings)
        return spec
    posts = [] if counts is None else best_posts(counts.saved, counts.taken, counts.together)
    if not posts:
        detail = "there is nothing to gain: layers keep no more than what goes into them"
        findings.warn(AT, detail, "nothing")
    found = tuple(names[post] for post in posts)
    return spec.model_copy(update={"activation_checkpointing": found or None})


def _check_order(asked: Sequence[str], names: Sequence[str], findings: Findings) -> None:
    places = {name: number for number, name in enumerate(names)}
    before = -1
    for number, name in enumerate(asked):
        if name not in places:
            detail = f"there is no layer {name!r}; there are: {', '.join(names[:30])}"
            findings.problem(f"{AT}/{number}", detail, "unknown_layer")
        elif places[name] <= before:
            detail = f"layer {name!r} comes before the one named before it: name them in order"
            findings.problem(f"{AT}/{number}", detail, "order")
        before = max(before, places.get(name, -1))


def _check_once(layers: Sequence[Layer], findings: Findings) -> None:
    for layer in layers:
        has_norm = layer.args.get("max_norm") is not None
        if layer.stateful or has_norm:
            reason = "is stateful" if layer.stateful else "changes its weights by max_norm"
            detail = f"layer {layer.name!r} {reason}, and cannot be computed twice: name the layer"
            findings.problem(AT, f"{detail} after it first, or one before it last", "once")


def _check_overwritten(
    asked: Sequence[str], names: Sequence[str], counts: "_Counts | None", findings: Findings
) -> None:
    for number, name in enumerate(asked):
        for begin, end in [] if counts is None else counts.together:
            if begin < names.index(name) <= end:
                detail = f"layer {names[end]!r} works in place on what is there before {name!r}: "
                detail += f"name a layer after {names[end]!r}, or leave out its inplace"
                findings.problem(f"{AT}/{number}", detail, "in_place")


def _counted(
    graph: Graph, wanted: Sequence[str], make_batch: Callable[[], dict[str, Tensor]]
) -> "_Counts | None":
    """Return the counts; None: a layer cannot run without data."""
    with contextlib.suppress(Exception), torch.device("meta"):
        network = Network(graph, wanted)
        network.train()
        return _Counts(network, make_batch())
    return None


def best_posts(
    saved: Sequence[int], taken: Sequence[int], together: Sequence[tuple[int, int]] = ()
) -> list[int]:
    """Return the boundaries that minimize the kept bytes plus those of the largest segment.

    ``saved``: bytes that each layer keeps for the backward pass; ``taken``: bytes of its inputs;
    ``together``: the first and last of layers that must not be separated.
    """
    parted = {place for begin, end in together for place in range(begin + 1, end + 1)}
    best, least = list[int](), sum(saved)
    for parts in range(2, min(len(saved), _MOST_PARTS) + 1):
        posts = _posts(saved, sum(saved) / parts, parted)
        ends = [*posts, len(saved)]
        most = max(sum(saved[begin:end]) for begin, end in pairwise(ends))
        needed = most + sum(taken[post] for post in posts)
        if len(posts) > 1 and needed < least:
            best, least = posts, needed
    return best


def _posts(saved: Sequence[int], limit: float, parted: Collection[int]) -> list[int]:
    """Return the start of each segment, where each has about ``limit`` bytes."""
    posts, held = list[int](), 0
    for place, size in enumerate(saved):
        if place not in parted and (not posts or (held and held + size > limit)):
            posts.append(place)
            held = 0
        held += size
    return posts


class _Counts:
    """Bytes that layers take and keep for the backward pass, each tensor once."""

    def __init__(self, network: Network, batch: dict[str, Tensor]) -> None:
        self.saved = [0] * len(network.layers)
        self.taken = [0] * len(network.layers)
        self._place = -1
        known = [*network.parameters(), *network.buffers(), *batch.values()]
        self._given = {_key(item) for item in known}
        self._seen = set(self._given)
        self._held: list[Any] = []
        """Storages, kept alive so that no key is reused."""
        self.together: list[tuple[int, int]] = []
        """First and last layer, where the last overwrites the first one's output."""
        self._made = dict.fromkeys((_key(item) for item in batch.values()), -1)
        for module in {*network.layers.values()}:
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end)
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda item: item):
            self._output = network(batch)

    def _begin(self, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._place += 1
        found = [item for item in inputs if isinstance(item, Tensor)]
        sizes = {_key(item): _size(item) for item in found if _key(item) not in self._given}
        self.taken[self._place] = sum(sizes.values())

    def _end(self, module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
        for _, tensor in leaves("", output):
            self._held.append(tensor.untyped_storage())
            first = self._made.setdefault(_key(tensor), self._place)
            if getattr(module, "inplace", False) is True:
                self.together.append((first, self._place))

    def _save(self, tensor: Tensor) -> Tensor:
        if _key(tensor) not in self._seen:
            self._seen.add(_key(tensor))
            self._held.append(tensor.untyped_storage())
            self.saved[self._place] += _size(tensor)
        return tensor


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
