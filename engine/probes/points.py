"""Where hooks go: the modules whose inputs and outputs some probe may look at."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from engine.network import Network
from engine.probes.select import Scope, may_match
from engine.probes.watch import Watch


@dataclass(frozen=True)
class Point:
    """A module that is looked at, and by which probes."""

    module: nn.Module
    path: str
    """Its place inside the layer; empty: the layer itself."""
    inputs: list[Watch]
    outputs: list[Watch]

    @property
    def scope(self) -> Scope:
        """What it is, for the globs."""
        return "inner" if self.path else "layer"


@dataclass(frozen=True)
class Spot:
    """A layer's module with the points in it."""

    module: nn.Module
    layers: list[str]
    """The layers that it is, in the order of the calls: several where it is shared."""
    points: list[Point] = field(default_factory=list[Point])

    @property
    def is_counted(self) -> bool:
        """Whether its calls have to be told apart."""
        return len(self.layers) > 1 or any(point.path for point in self.points)


def find_spots(network: Network, due: Sequence[Watch]) -> list[Spot]:
    """The modules to hook for some probes; each module once."""
    spots: dict[int, Spot] = {}
    for name, module in network.layers.items():
        spots.setdefault(id(module), Spot(module, [])).layers.append(name)
    for spot in spots.values():
        for path, module in spot.module.named_modules():
            names = [f"{name}.{path}" if path else name for name in spot.layers]
            scope: Scope = "inner" if path else "layer"
            may = [w for w in due if any(may_match(w.probe, name, scope) for name in names)]
            inputs = [watch for watch in may if "input" in watch.probe.kinds]
            outputs = [watch for watch in may if {"output", "output_grad"} & {*watch.probe.kinds}]
            if inputs or outputs:
                spot.points.append(Point(module, path, inputs, outputs))
    return [spot for spot in spots.values() if spot.points]
