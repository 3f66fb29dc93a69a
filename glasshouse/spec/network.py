"""Networks as graphs of named layers."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field as Constraint
from pydantic import (
    NonNegativeFloat,
    PositiveFloat,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from glasshouse.spec.clipping import GradClip, OutputGradClip
from glasshouse.spec.strict import Args, Name, Spec, TorchName, WrongAt

INPUT_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,63}((\.[0-9]{1,3})*|\.(lengths|values))$"

Input = Annotated[str, Constraint(pattern=INPUT_PATTERN)]
"""A layer or a data field; ``lstm.1.0`` is a leaf of a layer that returns a tuple, ``text.lengths``
the lengths of the rows of a sequence field, ``words.values`` the values of a sparse one."""


Parameters = Annotated[str, Constraint(pattern=r"^[A-Za-z0-9_.*?]{1,100}$")]
"""A parameter of a layer by torch's name, or several by a glob: ``weight``, ``bias*``."""
PerParameter = float | dict[Parameters, float]
"""A number for all parameters of a layer, or one each: the first that fits a name counts."""
_Few = Constraint(min_length=1, max_length=100)
Scale = PositiveFloat | Annotated[dict[Parameters, PositiveFloat], _Few]
Rate = NonNegativeFloat | Annotated[dict[Parameters, NonNegativeFloat], _Few]


ModulePath = Annotated[str, Constraint(pattern=r"^[^\x00-\x1f\x7f]{1,500}$")]


class ParameterInit(Spec):
    """What a parameter is filled with before training: a function of torch.nn.init."""

    type: TorchName
    """By torch's name: ``kaiming_normal_``, ``constant_`` …"""
    args: Args = {}


class Layer(Spec):
    """One named node of the graph."""

    name: Name
    """Unique among the layers and the data fields; probes and results use it."""
    shared_with: Name | None = None
    """An earlier layer, called here once more: the same parameters, an output of its own. Type and
    args are left out, or equal to that layer's."""
    type: TorchName = Constraint(default="", validate_default=True)
    """A class of torch.nn (``Conv2d``), or a listed function (``cat``, ``matmul`` …)."""
    args: Args = {}
    """Arguments by torch's names. A size that follows from the input may be left out."""
    inputs: tuple[Input, ...] | None = Constraint(default=None, min_length=1, max_length=64)
    """Layers or data fields it reads; left out, the layer before, or the first field."""
    lengths: Input | Literal[False] | None = None
    """For RNN, LSTM, GRU, SequencePool and EmbeddingBag: how many steps of each row count, as
    ``text.lengths`` or as a layer that gives an integer per row. Left out, the lengths of the
    sequence field whose steps its input has. False: all steps count, what rows are padded with,
    too."""
    path: ModulePath | None = None
    """Where it stood in the ``nn.Module`` that the graph was made from: ``blocks.0.conv``. Nothing
    is computed by it; the client finds the names of the module's weights by it."""
    trainable: bool = True
    """False: its parameters stay what they are, and the optimizer does not know them. Layers before
    it are trained all the same; the statistics of a batch normalisation go on."""
    stop_gradient: bool = False
    """Its output is a constant for the backward pass: neither it nor what is before it is trained
    by what comes after it here."""
    init: Annotated[dict[Parameters, ParameterInit], _Few] | None = None
    """What its parameters begin with; left out, what torch fills such a layer with."""
    lr_scale: Scale | None = None
    """Times the learning rate, for all its parameters or for those named."""
    weight_decay: Rate | None = None
    """Instead of the optimizer's own ``weight_decay``."""
    l1: Rate | None = None
    """Instead of the optimizer's own ``l1``."""
    grad_clip: GradClip | Literal[False] | None = None
    """How its parameters' gradients are clipped instead of the job's ``grad_clip``, which then
    leaves them out of its norm, too; ``global_norm``: all of this layer together. False: not."""
    stateful: bool = False
    """Of RNN, LSTM and GRU: row i of a batch begins in the state in which row i of the batch before
    has ended; an epoch and an evaluation begin with zeros. For rows in their stored order."""
    output_grad_clip: PositiveFloat | OutputGradClip | None = None
    """The gradient by its output is clipped element by element in the backward pass, to [-x, x] or
    [min, max], before the layer and what is before it take it."""

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Options that are not used are not written: a graph may have 10,000 layers."""
        return {
            name: value
            for name, value in handler(self).items()
            if name not in _OPTIONS or value != _OPTIONS[name]
        }

    @property
    def reads(self) -> tuple[str, ...]:
        """All that it needs: its inputs, and the lengths."""
        return (*(self.inputs or ()), *((self.lengths,) if self.lengths else ()))

    @field_validator("type", mode="wrap")
    @classmethod
    def _check_type(
        cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> str:
        if value == "" and info.data.get("shared_with") is not None:
            return ""
        if value == "":
            raise PydanticCustomError("missing", "Field required")
        return handler(value)


_OF_PARAMETERS = ("trainable", "init", "lr_scale", "weight_decay", "l1", "grad_clip")
_OPTIONS = {
    name: Layer.model_fields[name].default
    for name in (*_OF_PARAMETERS, "path", "stop_gradient", "stateful", "output_grad_clip")
}


class Graph(Spec):
    """A network written as its layers, in order; a layer may read any earlier layer or a field."""

    type: Literal["graph"] = "graph"
    layers: tuple[Layer, ...] = Constraint(min_length=1, max_length=10_000)
    outputs: tuple[Input, ...] | None = Constraint(default=None, min_length=1, max_length=64)
    """The layers that the network returns; left out, the last one."""

    def graph(self) -> "Graph":
        """Itself: a preset gives its graph."""
        return self

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        seen: set[str] = set()
        for number, layer in enumerate(self.layers):
            if layer.name in seen:
                detail = f"two layers are named {layer.name!r}; rename one"
                raise WrongAt("layers", number, detail=detail)
            seen.add(layer.name)
        object.__setattr__(self, "layers", tuple(self._filled()))  # frozen from here on
        return self

    def _filled(self) -> Iterator[Layer]:
        """The layers, those that are shared with the type and args of the first."""
        firsts: dict[str, Layer] = {}
        for number, layer in enumerate(self.layers):
            if layer.shared_with is None:
                firsts[layer.name] = layer
                yield layer
                continue
            first = firsts.get(layer.shared_with)
            if first is None:
                what = "an earlier layer that is not shared itself"
                detail = f"{layer.name!r}: shared_with must name {what}"
                raise WrongAt("layers", number, "shared_with", detail=detail)
            if layer.type not in ("", first.type) or layer.args not in ({}, first.args):
                detail = f"{layer.name!r} is {first.name!r} called once more: leave out type and"
                raise WrongAt("layers", number, detail=f"{detail} args, or give that layer's")
            for option in _OF_PARAMETERS:
                if getattr(layer, option) not in (_OPTIONS[option], getattr(first, option)):
                    detail = f"{layer.name!r} has the parameters of {first.name!r}: give {option}"
                    raise WrongAt("layers", number, option, detail=f"{detail} there")
            options = {option: _OPTIONS[option] for option in _OF_PARAMETERS}
            yield layer.model_copy(update={"type": first.type, "args": first.args, **options})
