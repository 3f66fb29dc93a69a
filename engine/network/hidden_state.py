"""Carry the hidden state of stateful recurrent layers from batch to batch.

Row i of a batch continues row i of the previous batch. Each epoch and each evaluation starts with
zeros. Gradients stop at the start of a batch (truncated backpropagation through time, Williams and
Peng, 1990). Depends on torch and jobs, not on files.
"""

import contextlib
from collections.abc import Generator, Mapping

from torch import Tensor

from engine.core.problems import Findings
from engine.core.snapshot import State
from engine.network.network import Network
from engine.network.recurrent import Recurrent
from glasshouse.spec import Graph, Layer, Source, TrainJob

_KINDS = ("RNN", "LSTM", "GRU")
States = dict[str, tuple[Tensor, ...]]
"""The hidden state of each layer that has one: torch's states, [layers, rows, width]."""


class HiddenState:
    """The hidden state of a network's stateful layers between batches."""

    def __init__(self, layers: Mapping[str, Recurrent]) -> None:
        self._layers = layers
        for module in layers.values():
            module.carries = True

    @classmethod
    def of(cls, graph: Graph, network: Network) -> "HiddenState | None":
        """Make a network's stateful layers carry their state; None: it has no such layer."""
        modules = network.layers
        found = {layer.name: modules[layer.name] for layer in graph.layers if layer.stateful}
        layers = {name: item for name, item in found.items() if isinstance(item, Recurrent)}
        return cls(layers) if layers else None

    def reset(self) -> None:
        """Set the hidden state to zeros."""
        self.put({})

    def snapshot(self) -> States:
        """Return the hidden state. Its tensors are never modified, so nothing is copied."""
        known = {name: module.hidden_state for name, module in self._layers.items()}
        return {name: item for name, item in known.items() if item is not None}

    def put(self, states: States) -> None:
        """Replace the hidden state."""
        for name, module in self._layers.items():
            module.hidden_state = states.get(name)

    @contextlib.contextmanager
    def apart(self) -> Generator[None]:
        """Start with zeros in this context, and restore the hidden state afterwards."""
        before = self.snapshot()
        self.reset()
        try:
            yield
        finally:
            self.put(before)

    def state(self) -> State:
        """Return the tensors as ``<layer>.<number>``; none at the start of an epoch."""
        return {
            f"{name}.{number}": item
            for name, items in self.snapshot().items()
            for number, item in enumerate(items)
        }

    def restore(self, state: State) -> None:
        """Continue from a saved state."""
        self.put({name: found for name in self._layers if (found := self._saved(name, state))})

    def _saved(self, name: str, state: State) -> tuple[Tensor, ...]:
        numbers = (key.rpartition(".") for key in state)
        known = sorted(int(number) for owner, _, number in numbers if owner == name)
        device = next(self._layers[name].parameters()).device
        return tuple(state[f"{name}.{number}"].to(device, copy=True) for number in known)


def alone(hidden_state: HiddenState | None) -> contextlib.AbstractContextManager[None]:
    """Start with zeros in this context, and restore the hidden state, if any, afterwards."""
    return contextlib.nullcontext() if hidden_state is None else hidden_state.apart()


def check_stateful(spec: TrainJob, findings: Findings) -> None:
    """Report layers that cannot carry a state, and jobs whose batches do not continue."""
    shared = {layer.shared_with for layer in spec.network.layers}
    found = False
    for position, layer in enumerate(spec.network.layers):
        if layer.stateful:
            found = True
            _check_layer(f"/network/layers/{position}", layer, shared, findings)
    if not found:
        return
    data = spec.data
    if data.shuffle.enabled is not False:
        detail = "a stateful layer keeps its state over batches: set data.shuffle.enabled to false"
        findings.problem("/data/shuffle/enabled", detail, "stateful")
    if data.bucket_by_length is not None:
        detail = "a stateful layer reads the rows in their stored order: leave out the buckets"
        findings.problem("/data/bucket_by_length", detail, "stateful")
    named = [("train", data.train)] if isinstance(data.train, Source) else []
    named += [(f"train/{number}", item) for number, item in enumerate(data.sources) if not named]
    for name, source in (*named, *data.validations.items()):
        if source.fraction is not None:
            detail = "a fraction is taken in an order of its own, and a stateful layer needs the"
            detail += " stored one: make splits of the dataset instead"
            findings.problem(f"/data/{name}/fraction", detail, "stateful")
    if spec.guards.nonfinite.action == "skip_step":
        detail = "a skipped step would leave its state to the next one: choose warn or fail where a"
        findings.problem("/guards/nonfinite/action", f"{detail} layer is stateful", "stateful")


def _check_layer(pointer: str, layer: Layer, shared: set[str | None], findings: Findings) -> None:
    reason = None
    if layer.type not in _KINDS:
        reason = f"is a {layer.type}, which has no state; these have: {', '.join(_KINDS)}"
    elif layer.args.get("bidirectional"):
        reason = "also reads its rows from behind, where no batch before has ended"
    elif len(layer.inputs or ()) > 1:
        reason = "is given the state that it begins with"
    elif layer.shared_with is not None or layer.name in shared:
        reason = "is called more than once"
    if reason is not None:
        detail = f"layer {layer.name!r} {reason}: leave out stateful"
        findings.problem(f"{pointer}/stateful", detail, "stateful")
