"""Networks as graphs of named layers."""

from typing import Annotated, Literal, Self

from pydantic import Field as Constraint
from pydantic import model_validator

from glasshouse.spec.strict import Args, Name, Spec, TorchName

Input = Annotated[str, Constraint(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}(\.[0-9]{1,3})*$")]
"""A layer or a data field; ``lstm.1.0`` is a leaf of a layer that returns a tuple."""


class Layer(Spec):
    """One named node of the graph."""

    name: Name
    """Unique among the layers and the data fields; probes and results use it."""
    type: TorchName
    """A class of torch.nn (``Conv2d``), or a listed function (``cat``, ``matmul`` …)."""
    args: Args = {}
    """Arguments by torch's names. A size that follows from the input may be left out."""
    inputs: tuple[Input, ...] | None = Constraint(default=None, min_length=1, max_length=64)
    """Layers or data fields it reads; left out, the layer before, or the first field."""


class Graph(Spec):
    """A network written as its layers, in order; a layer may read any earlier layer or a field."""

    type: Literal["graph"] = "graph"
    layers: tuple[Layer, ...] = Constraint(min_length=1, max_length=10_000)
    outputs: tuple[Input, ...] | None = Constraint(default=None, min_length=1, max_length=64)
    """The layers that the network returns; left out, the last one."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        seen: set[str] = set()
        for layer in self.layers:
            if layer.name in seen:
                raise ValueError(f"two layers are named {layer.name!r}; rename one")
            seen.add(layer.name)
        return self
