"""Hook sites: the modules whose inputs and outputs some probe may watch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from engine.core.tensor_names import root
from engine.losses.losses import Losses
from engine.network.network import Network
from engine.probes.watched.probe import ActiveProbe, ActiveProbes
from engine.probes.watched.select import LOSS, LOSS_ROWS, LOSS_SAMPLES, Scope, may_match

_LOSSES = (LOSS, LOSS_SAMPLES, LOSS_ROWS)
Seen = tuple[str, Tensor, ActiveProbes]
"""A tensor by its name, and the probes that watch it."""


@dataclass(frozen=True)
class HookPoint:
    """A watched module, and the probes that watch it."""

    module: nn.Module
    path: str
    """Its path inside the layer; empty: the layer itself."""
    inputs: list[ActiveProbe]
    outputs: list[ActiveProbe]
    _known: dict[tuple[str, str], ActiveProbes] = field(default_factory=dict, repr=False)

    def wanting(self, kind: str, leaf: str, owner: str, number: int) -> ActiveProbes:
        """Return the probes of a leaf of a call; the same at each step, so it is cached."""
        known = self._known.get((kind, leaf))
        if known is None:
            scope: Scope = "inner" if self.path else "layer"
            known = ActiveProbes(
                watch
                for watch in (self.inputs if kind == "input" else self.outputs)
                if watch.wants(kind, leaf, owner=owner, is_first=number == 0, scope=scope)
            )
            self._known[kind, leaf] = known
        return known


@dataclass(frozen=True)
class HookedModule:
    """A layer's module with its hook points."""

    module: nn.Module
    layers: list[str]
    """The layers that use it, in the order of the calls; several if it is shared."""
    points: list[HookPoint] = field(default_factory=list[HookPoint])

    @cached_property
    def is_counted(self) -> bool:
        """Whether its calls have to be counted to tell them apart."""
        return len(self.layers) > 1 or any(point.path for point in self.points)


class HookSites:
    """The hook sites of a network for one set of due probes."""

    def __init__(self, network: Network, due: Sequence[ActiveProbe]) -> None:
        self._network = network
        self._due = due
        self.sites = _find_sites(network, due)
        self.order = {name: number for number, name in enumerate(network.names)}
        """The index of each layer in the network."""
        self.loss = {name: wanting(due, "output", name, "loss") for name in _LOSSES}
        """The probes that watch the loss, by its names."""
        kinds = {kind for watch in due for kind in watch.probe.kinds}
        self.watches_update = bool({"update", "optim_state"} & kinds)
        """Whether a probe watches the update."""
        self.sees_clipped = any(
            watch.point == "clipped" and "param_grad" in watch.probe.kinds for watch in due
        )
        """Whether a probe watches gradients after clipping."""
        self._parameters: dict[str, list[Seen]] = {}
        self._alike: dict[tuple[ActiveProbe, ...], ActiveProbes] = {}

    def place(self, name: str) -> int:
        """Return the index of a tensor's layer; a tensor of no layer comes last."""
        return self.order.get(root(name), len(self.order))

    def parameters(self, kind: str) -> list[Seen]:
        """Return the parameters of which a probe wants this kind."""
        if kind not in self._parameters:
            named = self._network.named_parameters()
            found = [(name, item, wanting(self._due, kind, name)) for name, item in named]
            self._parameters[kind] = [
                (name, item, self._alike.setdefault(tuple(watches), watches))
                for name, item, watches in found
                if watches
            ]
        return self._parameters[kind]


def wanting(
    due: Sequence[ActiveProbe], kind: str, name: str, scope: Scope = "parameter"
) -> ActiveProbes:
    """Return the probes that watch a tensor that is not a leaf of a layer."""
    return ActiveProbes(watch for watch in due if watch.wants(kind, name, scope=scope))


def _find_sites(network: Network, due: Sequence[ActiveProbe]) -> list[HookedModule]:
    """Return the modules to hook for some probes; each module once."""
    sites: dict[int, HookedModule] = {}
    for name, module in network.layers.items():
        sites.setdefault(id(module), HookedModule(module, [])).layers.append(name)
    for site in sites.values():
        for path, module in site.module.named_modules():
            names = [f"{name}.{path}" if path else name for name in site.layers]
            scope: Scope = "inner" if path else "layer"
            may = [w for w in due if any(may_match(w.probe, name, scope) for name in names)]
            inputs = [watch for watch in may if "input" in watch.probe.kinds]
            outputs = [watch for watch in may if {"output", "output_grad"} & {*watch.probe.kinds}]
            if inputs or outputs:
                site.points.append(HookPoint(module, path, inputs, outputs))
    return [site for site in sites.values() if site.points]


@torch.no_grad()
def sample_losses(loss_fn: Losses, inputs: Sequence[Any]) -> Tensor:
    """Return each row's loss; if a row has several values, their mean.

    Raises:
        ValueError: a loss has no value per row, or not for the same rows.
    """
    each = [term.of_rows(given) for term, given in loss_fn.split(inputs)]
    if len({item.shape for item in each}) > 1:
        raise ValueError("the losses are of different numbers of rows")
    return loss_fn.weighted(each)
