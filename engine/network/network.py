"""Networks: a graph of named layers as one torch module whose layer outputs are all accessible.

Depends on torch and graphs, not on data, training or jobs.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engine.core import arguments
from engine.core.tensor_names import host_lengths_of, root
from engine.network.inference_plan import InferenceStep, Values, without_dropout
from engine.network.layer_types import build_layer, layer_parameters
from engine.network.layers import (
    OF_ONE_TYPE,
    LayerFailed,
    Runnable,
    Step,
    in_pairs,
    run_all,
    segmented,
)
from engine.network.pipeline_stages import Stage
from engine.network.placement import Move, Placement, moves_home, with_moves
from engine.optim.output_gradient_clipping import OutputClips
from glasshouse.spec import Graph, Layer

if TYPE_CHECKING:
    from engine.network.fully_sharded import FullySharded
    from engine.network.tensor_parallel import TensorParallel


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
        placement: Placement | None = None,
    ) -> None:
        """``kept_at``: checkpoint boundaries; activations between two of them are recomputed.

        ``placement``: the devices of the layers, which `to_devices` moves them to; None: one.
        """
        super().__init__()
        layers = needed_layers(graph, wanted) if prune else list(graph.layers)
        finished = _last_reads(layers, wanted)
        self.placement = placement
        """The devices of the layers; None: all are on the same one."""
        self.output_clips = OutputClips(graph)
        self.low_precision: torch.dtype | None = None
        """The autocast dtype; None: everything runs in float32."""
        self.memory_format = torch.contiguous_format
        self.divided: TensorParallel | None = None
        """How processes divide its layers; None: they do not."""
        self.sharded: FullySharded | None = None
        """How processes shard its parameters; None: they do not."""
        self.stages: dict[int, Stage] = {}
        """The stages of a pipeline that are in this process, by their numbers."""
        self.elsewhere: dict[str, nn.Module] = {}
        """The layers that other processes have, on the meta device, by name."""
        self.copies: dict[str, nn.Module] = {}
        """Copies of modules that other processes have, whose parameters layers here share."""
        self.names = tuple(layer.name for layer in layers)
        """All layers in order, with those that other processes have."""
        self._new_values: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict
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
                host_lengths_of(layer.lengths) if layer.lengths else None,
            )
            self._steps.append(step)

        self._usual: Sequence[Runnable] = segmented(self._steps, kept_at)
        if placement is not None:
            items = _freeing(with_moves(self._steps, placement), wanted)
            self._usual = self._paired = [
                *segmented(items, kept_at),
                *moves_home(wanted, placement),
            ]
            self._plan = self._usual
            return
        # Hooks do not run in a recomputation, so a pair could run in another order than before.
        self._paired = self._usual if kept_at else in_pairs(self._steps, wanted)
        self._plan = self._usual

    @property
    def plans(self) -> dict[int, Sequence[Runnable]]:
        """What it runs in a pass, in order; or in that of each of its stages, by their numbers."""
        return {number: stage.plan for number, stage in self.stages.items()} or {0: self._plan}

    def shard(self, sharded: "FullySharded") -> None:
        """Run the plans that gather parameters before their layers."""
        self.sharded = sharded
        for number, stage in self.stages.items():
            self.stages[number] = replace(stage, plan=sharded.plans[number])
        if not self.stages:
            self._usual = self._paired = self._plan = sharded.plans[0]

    def keep_stages(
        self,
        stages: Mapping[str, int],
        own: Collection[int],
        between: Sequence[tuple[str, ...]],
        wanted: Sequence[str],
        kept_at: Sequence[str],
    ) -> None:
        """Keep the layers of some stages of a pipeline; others lose their memory.

        A layer that shares the parameters of another process's layer gets a copy of them, which is
        none of the network's own modules.

        Args:
            stages: the stage of each layer, by its name.
            own: the stages to keep.
            between: the values that each stage but the last gives to the next one.
            wanted: what is read after the last stage.
            kept_at: checkpoint boundaries.
        """
        away = {step.name: step.module for step in self._steps if stages[step.name] not in own}
        moved = {id(module): name for name, module in away.items() if name in self._modules}
        self._steps = [
            self._with_own_copy(step, moved) for step in self._steps if stages[step.name] in own
        ]
        for number in sorted(own):
            reads = between[number - 1] if number else ()
            gives = between[number] if number < len(between) else ()
            steps = [step for step in self._steps if stages[step.name] == number]
            finished = _last_reads(steps, gives or wanted)
            steps = [
                step._replace(finished=finished.get(place, ())) for place, step in enumerate(steps)
            ]
            overwrites = any(getattr(step.module, "inplace", False) for step in steps)
            plan = segmented(steps, kept_at)
            self.stages[number] = Stage(number, reads, gives, plan, overwrites)
        for name in moved.values():
            self.elsewhere[name] = away[name].to("meta")
            del self._modules[name]

    def with_outputs(self, wanted: Sequence[str]) -> "Network":
        """Return a network with the same modules that computes only what some outputs depend on.

        For inference on one device: it must not be trained, moved or changed.
        """
        needed, steps = {root(name) for name in wanted}, list[Step]()
        for step in reversed(self._steps):
            if step.name in needed:
                needed.update(root(name) for name in step.reads)
                steps.insert(0, step)
        view = copy.copy(self)
        view._new_values = Values
        view._steps = without_dropout(steps, wanted)
        finished = _last_reads(view._steps, wanted)
        steps = [
            step._replace(finished=finished.get(place, ()))
            for place, step in enumerate(view._steps)
        ]
        paired = in_pairs(steps, wanted) if self.memory_format is torch.channels_last else steps
        view._plan = [InferenceStep.of(item) if isinstance(item, Step) else item for item in paired]
        return view

    def _with_own_copy(self, step: Step, moved: Mapping[int, str]) -> Step:
        """Return a step with a copy of its module if that moves; ``moved``: names by ids."""
        if (owner := moved.get(id(step.module))) is None:
            return step
        if owner not in self.copies:
            self.copies[owner] = copy.deepcopy(step.module)
        return step._replace(module=self.copies[owner])

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of all parameters in order, with those that other processes have."""
        modules = {**self.elsewhere, **dict(self.named_children())}
        return tuple(
            f"{layer}.{name}"
            for layer in self.names
            if layer in modules
            for name, _ in modules[layer].named_parameters()
        )

    @property
    def is_staged(self) -> bool:
        """Whether other processes have the other layers of it."""
        return bool(self.stages)

    def run_stage(self, stage: Stage, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the layers of a stage from data fields and the values of earlier stages."""
        return self._forward(values, stage.plan, stage.number)

    def to_devices(self, device: torch.device) -> "Network":
        """Move each layer to its own device; without a placement, all to ``device``."""
        if self.placement is None:
            for module in self.copies.values():
                module.to(device)
            return self.to(device)
        for step in self._steps:
            step.module.to(self.placement.layers[step.name])
        return self

    def devices(self, first: torch.device) -> tuple[torch.device, ...]:
        """Return the devices that compute it; without a placement, ``first`` alone."""
        return (first,) if self.placement is None else self.placement.devices

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
        for module in [*self._modules.values(), *self.copies.values()]:
            if module is not None:
                module.train(mode)
        return self

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute every layer in order, and free each value after its last reader."""
        return self._forward(batch, self._plan)

    def _forward(
        self, batch: Mapping[str, Tensor], plan: Sequence[Runnable], stage: int = 0
    ) -> dict[str, Tensor]:
        if self.memory_format is not torch.contiguous_format:
            batch = {name: self._laid_out(item) for name, item in batch.items()}
        run = partial(_run, batch, plan, self._new_values)
        if self.sharded is not None:
            run = partial(self.sharded.gathering, run, stage)
        if self.low_precision is None:
            return run()
        device = next(iter(batch.values())).device.type
        with torch.autocast(device, dtype=self.low_precision):
            return run()

    def _laid_out(self, item: Tensor) -> Tensor:
        is_image = item.dim() == 4 and item.is_floating_point()
        return item.contiguous(memory_format=self.memory_format) if is_image else item


def _run(
    batch: Mapping[str, Tensor],
    plan: Sequence[Runnable],
    new: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
) -> dict[str, Tensor]:
    values = new(batch)
    run_all(plan, values, {})
    return values


def _construct(layer: Layer, pointer: str) -> nn.Module:
    known = layer_parameters(layer.type, pointer)
    args = arguments.check(known, dict(layer.args), f"{pointer}/args", layer.type)
    try:
        return build_layer(layer.type, args, trainable=layer.trainable)
    except Exception as cause:
        raise LayerFailed(layer.name, cause) from cause


def _freeing(items: Sequence[Step | Move], wanted: Sequence[str]) -> list[Step | Move]:
    """Return the items, each with the values that it is the last to read."""
    finished = _last_reads(items, wanted)
    return [
        item._replace(finished=finished.get(position, ())) for position, item in enumerate(items)
    ]


def _last_reads(
    layers: Sequence[Layer | Step | Move], wanted: Sequence[str]
) -> dict[int, tuple[str, ...]]:
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
