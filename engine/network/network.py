"""Networks: a graph of named layers as one torch module whose layer outputs are all accessible.

Depends on torch and graphs, not on data, training or jobs.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from engine.core import arguments
from engine.core.tensor_names import root
from engine.network.layer_types import build_layer, layer_parameters
from engine.network.layers import (
    OF_ONE_TYPE,
    LayerFailed,
    Pair,
    Segment,
    Step,
    in_pairs,
    run_all,
    segmented,
)
from engine.optim.output_gradient_clipping import OutputClips
from glasshouse.spec import Graph, Layer


def inputs_of(graph: Graph, position: int, fields: Sequence[str]) -> tuple[str, ...]:
    """Return a layer's inputs; by default the previous layer, or the first field."""
    layer = graph.layers[position]
    if layer.inputs is not None:
        return layer.inputs
    return (graph.layers[position - 1].name if position else fields[0],)


def needed_layers(graph: Graph, wanted: Sequence[str]) -> list[Layer]:
    """Return the layers of a resolved graph that the wanted outputs depend on, in order."""
    needed = {root(name) for name in wanted}
    kept: list[Layer] = []
    for layer in reversed(graph.layers):
        if layer.name in needed:
            kept.append(layer)
            needed.update(root(name) for name in layer.reads)
    return kept[::-1]


class Network(nn.Module):
    """A resolved graph (inputs and sizes filled in) as a module.

    Calling it with a batch, a mapping of field names to tensors, returns a mapping with the wanted
    outputs and the fields. Layers are created in the graph's order, each with torch's own
    initialization. ``state_dict`` keys are the layer's name and torch's: ``conv1.weight``. A shared
    layer is the module of the first layer that uses it, and its parameters have that layer's name.
    """

    def __init__(
        self,
        graph: Graph,
        wanted: Sequence[str],
        *,
        prune: bool = False,
        kept_at: Sequence[str] = (),
    ) -> None:
        """``kept_at``: checkpoint boundaries; activations between two of them are recomputed."""
        super().__init__()
        layers = needed_layers(graph, wanted) if prune else list(graph.layers)
        finished = _last_reads(layers, wanted)
        self.output_clips = OutputClips(graph)
        self.low_precision: torch.dtype | None = None
        """The autocast dtype; None: everything runs in float32."""
        self.memory_format = torch.contiguous_format
        self._steps: list[Step] = []
        for position, layer in enumerate(layers):
            owner = layer.shared_with or layer.name
            # Not with add_module, which refuses names such as "forward" that a user may choose.
            module = self._modules.get(owner)
            if module is None:
                module = _construct(layer, f"/network/layers/{position}")
            self._modules[owner] = module
            inputs = tuple(layer.inputs or ())
            clips = self.output_clips if layer.name in self.output_clips else None
            step = Step(
                layer.name,
                module,
                inputs,
                layer.lengths or None,
                finished.get(position, ()),
                layer.stop_gradient,
                clips,
                layer.lengths is None and not isinstance(module, OF_ONE_TYPE),
            )
            self._steps.append(step)

        self._usual = segmented(self._steps, kept_at)
        # Hooks do not run in a recomputation, so a pair could run in another order than before.
        self._paired = self._usual if kept_at else in_pairs(self._steps, wanted)
        self._plan: Sequence[Step | Pair | Segment] = self._usual

    def lay_out(self, memory_format: torch.memory_format) -> None:
        """Set the memory format of images and convolution weights.

        Only in channels_last is max pooling over values of either sign as fast as over ReLU
        outputs. In other formats it runs branches that the CPU predicts badly.
        """
        self.memory_format = memory_format
        self._plan = self._paired if memory_format is torch.channels_last else self._usual
        self.to(memory_format=memory_format)  # pyright: ignore[reportCallIssue]

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The layers by name, in order; shared layers have one module."""
        return {step.name: step.module for step in self._steps}

    def train(self, mode: bool = True) -> "Network":
        """Switch between training and evaluation; works even if a layer is named ``training``."""
        self.__dict__["training"] = mode
        for module in self._modules.values():
            if module is not None:
                module.train(mode)
        return self

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute every layer in order, and free each value after its last reader."""
        if self.memory_format is not torch.contiguous_format:
            batch = {name: self._laid_out(item) for name, item in batch.items()}
        if self.low_precision is None:
            return self._run(batch)
        device = next(iter(batch.values())).device.type
        with torch.autocast(device, dtype=self.low_precision):
            return self._run(batch)

    def _laid_out(self, item: Tensor) -> Tensor:
        is_image = item.dim() == 4 and item.is_floating_point()
        return item.contiguous(memory_format=self.memory_format) if is_image else item

    def _run(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = dict(batch)
        run_all(self._plan, values, {})
        return values


def _construct(layer: Layer, pointer: str) -> nn.Module:
    known = layer_parameters(layer.type, pointer)
    args = arguments.check(known, dict(layer.args), f"{pointer}/args", layer.type)
    try:
        return build_layer(layer.type, args, trainable=layer.trainable)
    except Exception as cause:
        raise LayerFailed(layer.name, cause) from cause


def _last_reads(layers: Sequence[Layer], wanted: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """Return, for each position, the layers whose output no later layer reads."""
    last = {layer.name: position for position, layer in enumerate(layers)}
    for position, layer in enumerate(layers):
        for source in layer.reads:
            if root(source) in last:
                last[root(source)] = position
    kept = {root(source) for source in wanted}
    finished: dict[int, tuple[str, ...]] = {}
    for name, position in last.items():
        if name not in kept:
            finished[position] = (*finished.get(position, ()), name)
    return finished


def parameter_counts(module: nn.Module) -> tuple[int, bool]:
    """Return the number of parameters of a layer, and whether any is trainable."""
    found = list(module.parameters())
    return sum(item.numel() for item in found), any(item.requires_grad for item in found)
