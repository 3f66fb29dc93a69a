"""The graph while it is built: its layers, their weights, and the values of its tensors.

Variables have no shape suffixes, because these are the user's tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from glasshouse.client.modules.plain_torch import build
from glasshouse.client.modules.source_lines import Stopped
from glasshouse.client.modules.values import Fixed, Ref, Varying

Document = dict[str, Any]
MAX_NAME = 64


@dataclass
class Drawing:
    """The layers and weights that have been converted so far."""

    module: nn.Module
    fields: Mapping[str, tuple[Tensor, ...]]
    """By data field: the tensors of the samples."""
    layers: list[Document] = field(default_factory=list[Document])
    weights: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The weights, by name in the graph: ``conv1.weight``."""
    owners: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    """By ``id()`` of a parameter: the layer that has it, and its name in that layer."""
    values: dict[str, tuple[Tensor, ...]] = field(default_factory=dict[str, tuple[Tensor, ...]])
    """By tensor of the graph: its value for each sample."""
    _taken: set[str] = field(default_factory=set[str])
    _fixed: dict[int, tuple[Tensor, str]] = field(default_factory=dict[int, tuple[Tensor, str]])

    def __post_init__(self) -> None:
        self.values |= self.fields
        self._taken |= {name.partition(".")[0] for name in self.fields}

    def name(self, wanted: str) -> str:
        """A unique name for a layer, similar to the wanted one."""
        base = wanted.replace(".", "_")
        base = f"_{base}" if not base or base[0].isdigit() else base
        name, number = base[-MAX_NAME:].lstrip("0123456789") or "_", 1
        while name in self._taken:
            number += 1
            end = f"_{number}"
            name = f"{base[-(MAX_NAME - len(end)) :].lstrip('0123456789') or '_'}{end}"
        self._taken.add(name)
        return name

    def add(self, kind: str, wanted: str, inputs: Sequence[Any], **layer: Any) -> Ref:
        """Add a layer that reads tensors; return its output."""
        names = [self.reference(item) for item in inputs]  # first: constants become layers
        name = self.name(wanted)
        drawn: Document = {"name": name, "type": kind} if kind else {"name": name}
        args = {key: item for key, item in layer.pop("args", {}).items() if item is not None}
        if args:
            drawn["args"] = args
        self.layers.append({**drawn, "inputs": names, **layer})
        return Ref(name)

    def see(self, ref: Ref, values: tuple[Tensor, ...]) -> Ref:
        """Store the value of a tensor of the graph for each sample."""
        self.values[ref.name] = values
        return ref

    def reference(self, item: Any) -> str:
        """The name by which a layer reads an input.

        Raises:
            Stopped: the input is not a tensor.
        """
        if isinstance(item, Ref):
            return item.name
        if isinstance(item, Varying):
            return self._of_steps(item.values).name
        if isinstance(item, Fixed):
            return self.constant(item)
        if isinstance(item, (bool, int, float)):
            return self.constant(Fixed(torch.tensor(item)))
        raise Stopped(f"expected a tensor instead of {_said(item)}")

    def constant(self, item: Fixed) -> str:
        """Add a constant tensor as a layer."""
        known = self._fixed.get(id(item.value))
        if known is not None:
            return known[1]
        drawn = self._parameter(item.value, item.path or "constant", trainable=False)
        self._fixed[id(item.value)] = item.value, drawn
        if item.path is not None:
            self.layers[-1]["path"] = item.path
        return drawn

    def _of_steps(self, values: tuple[Any, ...]) -> Ref:
        """Add a layer for positions or a causal mask, which depend only on the sequence length.

        Raises:
            Stopped: the tensor is neither.
        """
        if all(isinstance(value, Tensor) for value in values):
            for name, tensors in self.fields.items():
                if any(item.dim() < 2 for item in tensors):
                    continue
                steps = [torch.arange(item.shape[1]) for item in tensors]
                if _alike(values, steps):
                    return self.function("positions", [Ref(name)])
                seen = [item[:, None] >= item for item in steps]
                if _alike(values, seen):
                    return self.function("causal_mask", [Ref(name)])
                if _alike(values, [~item for item in seen]):
                    mask = self.function("causal_mask", [Ref(name)])
                    return self.function("logical_not", [mask])
        raise Stopped(f"it needs {_said(Varying(values))}, which is not supported in a graph")

    def function(self, name: str, inputs: Sequence[Any], **args: Any) -> Ref:
        """Add a function layer and compute its values."""
        return self.layer_of(name, name, inputs, args=args)

    def layer_of(self, kind: str, wanted: str, inputs: Sequence[Any], **layer: Any) -> Ref:
        """Add a layer without weights and compute its values."""
        ref = self.add(kind, wanted, inputs, **layer)
        drawn = self.layers[-1]
        given = [self.values[name] for name in drawn["inputs"]]
        run = build(drawn["type"], drawn.get("args", {}))
        return self.see(ref, tuple(run(*both) for both in zip(*given, strict=True)))

    def parameter(self, item: nn.Parameter, path: str) -> Ref:
        """Add a Parameter layer for a parameter that the user's code reads directly."""
        if id(item) in self.owners:
            owner, _ = self.owners[id(item)]
            if owner in self._of_parameters():
                return Ref(owner)
            raise Stopped(
                f"the parameter {path!r} belongs to layer {owner!r} and is also used elsewhere; "
                "only an Embedding without options can be tied to a Linear without bias"
            )
        name = self._parameter(item, path, trainable=item.requires_grad)
        self.layers[-1]["path"] = path
        self.owners[id(item)] = (name, "weight")
        return Ref(name)

    def _of_parameters(self) -> set[str]:
        return {layer["name"] for layer in self.layers if layer["type"] == "Parameter"}

    def _parameter(self, value: Tensor, wanted: str, *, trainable: bool) -> str:
        tensor = _storable(value.detach(), wanted)
        args: Document = {"shape": list(tensor.shape)}
        if tensor.dtype is not torch.float32:
            args["kind"] = str(tensor.dtype).removeprefix("torch.")
        is_learned = tensor.dtype is torch.float32
        option = {"trainable": False} if is_learned and not trainable else {}
        first = next(iter(self.fields))
        drawn = self.add("Parameter", wanted, [Ref(first)], args=args, **option)
        self.weights[f"{drawn.name}.weight"] = tensor
        self.see(drawn, (tensor,) * len(self.fields[first]))
        return drawn.name

    def owned(self, module: nn.Module) -> dict[str, str | None]:
        """By parameter of a module: the layer that already has it, or None."""
        return {
            name: self.owners[id(item)][0] if id(item) in self.owners else None
            for name, item in module.named_parameters(remove_duplicate=False)
        }

    def take(self, layer: str, module: nn.Module) -> None:
        """Record that a layer has the weights of a module."""
        for name, item in module.named_parameters(remove_duplicate=False):
            self.owners[id(item)] = (layer, name)
        for name, item in module.state_dict().items():
            self.weights[f"{layer}.{name}"] = _storable(item.detach(), f"{layer}.{name}")

    def layer(self, name: str) -> Document:
        """The layer of this name."""
        return next(item for item in self.layers if item["name"] == name)


def trainable(module: nn.Module, path: str) -> bool:
    """Whether the parameters of a layer are trainable.

    Raises:
        Stopped: only some of them are, which a layer cannot express.
    """
    asked = {name: item.requires_grad for name, item in module.named_parameters()}
    if len(set(asked.values())) > 1:
        frozen = ", ".join(name for name, is_trained in asked.items() if not is_trained)
        raise Stopped(f"in {path!r}, only {frozen} is frozen: freeze the whole layer or nothing")
    return all(asked.values())


def _storable(value: Tensor, name: str) -> Tensor:
    if value.is_floating_point() and value.dtype is not torch.float32:
        raise Stopped(f"{name!r} is {value.dtype}; weights are float32: call module.float() first")
    if value.dtype not in (torch.float32, torch.int64, torch.bool):
        if value.is_complex():
            raise Stopped(f"{name!r} is complex")
        value = value.to(torch.int64)
    if value.layout is not torch.strided:
        raise Stopped(f"{name!r} is {value.layout}")
    return value


def _alike(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Whether tensors have the same values; a float may stand for a bool."""
    return all(
        mine.shape == other.shape and bool((mine.cpu() == other).all())
        for mine, other in zip(found, wanted, strict=True)
    )


def _said(item: Any) -> str:
    if isinstance(item, Varying):
        return "a size that differs between batches"
    return f"{item!r:.60}" if item is None or isinstance(item, (str, tuple, list)) else str(item)
