"""Networks as graphs of named layers."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field as Constraint
from pydantic import (
    NonNegativeFloat,
    NonNegativeInt,
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
"""The name of a layer or data field. ``lstm.1.0`` is a leaf of a layer that returns a tuple,
``text.lengths`` are the lengths of the rows of a sequence field, and ``words.values`` are the
values of a sparse field."""


Parameters = Annotated[str, Constraint(pattern=r"^[A-Za-z0-9_.*?]{1,100}$")]
"""A torch name or glob of parameters of a layer: ``weight``, ``bias*``."""
PerParameter = float | dict[Parameters, float]
"""A number for all parameters of a layer, or numbers by parameter name or glob; the first match
applies."""
_Few = Constraint(min_length=1, max_length=100)
Scale = PositiveFloat | Annotated[dict[Parameters, PositiveFloat], _Few]
Rate = NonNegativeFloat | Annotated[dict[Parameters, NonNegativeFloat], _Few]


ModulePath = Annotated[str, Constraint(pattern=r"^[^\x00-\x1f\x7f]{1,500}$")]


class ParameterInit(Spec):
    """Initial values of a parameter, by a function of torch.nn.init."""

    type: TorchName
    """The function name. Example: ``"kaiming_normal_"``."""
    args: Args = {}
    """Arguments of the function, by torch's names. Example: ``{"nonlinearity": "relu"}``."""


class Layer(Spec):
    """A node of the graph: a torch module or function with a name."""

    name: Name
    """Unique among layers and data fields. Probes and results use this name. Example:
    ``"conv1"``."""
    shared_with: Name | None = None
    """The name of an earlier layer to call again: with the same parameters and a separate output.
    Then omit ``type`` and ``args``, or repeat those of that layer. Example: ``"embedding"``."""
    type: TorchName = Constraint(default="", validate_default=True)
    """A class of torch.nn, or a function such as ``cat`` or ``matmul``; ``GET /catalog/layers``
    lists them. Required unless ``shared_with`` is set. Example: ``"Conv2d"``."""
    args: Args = {}
    """Arguments, by torch's names. Sizes that follow from the input are optional. Example:
    ``{"out_features": 10}``."""
    inputs: tuple[Input, ...] | None = Constraint(default=None, min_length=1, max_length=64)
    """The inputs, in order. Default: the previous layer; for the first layer, the first data field.
    Example: ``["conv1", "image"]``."""
    lengths: Input | Literal[False] | None = None
    """For RNN, LSTM, GRU, SequencePool and EmbeddingBag: the number of steps of each row, as the
    lengths of a field or as a layer that returns an integer per row. Default: the lengths of the
    sequence field whose steps the input has. ``false``: use all steps, padding included. Example:
    ``"text.lengths"``."""
    device: NonNegativeInt | None = None
    """With ``parallel.strategy`` ``placed``: the device that the layer runs on, as an index into
    the devices of the job. Its parameters and their optimizer state are there too. Default: the
    device of its first input, and device 0 for data fields. Example: ``1``."""
    stage: NonNegativeInt | None = None
    """With ``parallel.strategy`` ``pipeline``: the stage that the layer is in, from 0. A layer
    cannot be in an earlier stage than a layer that it reads. Default: the stage of the previous
    layer; if no layer has a stage, the plan divides the layers by memory. Example: ``1``."""
    path: ModulePath | None = None
    """The path of the layer in the ``nn.Module`` that the graph was created from. It does not
    affect computation; the client uses it to map weights to the module's names. Example:
    ``"blocks.0.conv"``."""
    trainable: bool = True
    """``false`` freezes the layer's parameters: they are not passed to the optimizer. Earlier
    layers are still trained through it, and running statistics of batch normalization are still
    updated."""
    stop_gradient: bool = False
    """``true`` detaches the output (torch's ``detach``): no gradient flows through this output to
    this layer or earlier layers."""
    init: Annotated[dict[Parameters, ParameterInit], _Few] | None = None
    """Initial values of parameters, by name or glob. Default: torch's own initialization. Example:
    ``{"weight": {"type": "xavier_uniform_"}}``."""
    lr_scale: Scale | None = None
    """Factor of the learning rate: one number for all parameters, or numbers by parameter name or
    glob. Example: ``{"bias": 2.0}``."""
    weight_decay: Rate | None = None
    """Replaces the optimizer's ``weight_decay``: one number for all parameters, or numbers by
    parameter name or glob. Example: ``{"bias": 0}``."""
    l1: Rate | None = None
    """Replaces the optimizer's ``l1``: one number for all parameters, or numbers by parameter name
    or glob. Example: ``0.001``."""
    grad_clip: GradClip | Literal[False] | None = None
    """Replaces the job's ``grad_clip`` for this layer's parameters, and excludes them from its
    norm. ``global_norm`` is then the norm of this layer's gradients. ``false``: no clipping.
    Example: ``{"type": "norm", "max": 1.0}``."""
    stateful: bool = False
    """For RNN, LSTM and GRU: row i of a batch starts from the final hidden state of row i of the
    previous batch. Each epoch and each evaluation starts with zeros. Requires rows in their stored
    order."""
    output_grad_clip: PositiveFloat | OutputGradClip | None = None
    """Clips the gradient with respect to the output element by element in the backward pass: to
    [-x, x] for a number, or to [min, max]. This layer's parameters and earlier layers receive the
    clipped gradient. Example: ``0.1``."""

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit unused options: a graph can have 10,000 layers."""
        return {
            name: value
            for name, value in handler(self).items()
            if name not in _OPTIONS or value != _OPTIONS[name]
        }

    @property
    def reads(self) -> tuple[str, ...]:
        """The inputs and the lengths."""
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
    for name in (
        *(*_OF_PARAMETERS, "device", "stage", "path", "stop_gradient"),
        *("stateful", "output_grad_clip"),
    )
}


class Graph(Spec):
    """A network as a list of layers. A layer can read any earlier layer and any data field."""

    type: Literal["graph"] = "graph"
    """Selects a graph of layers."""
    layers: tuple[Layer, ...] = Constraint(min_length=1, max_length=10_000)
    """The layers, in the order of computation. Example: ``[{"name": "fc", "type": "Linear", "args":
    {"out_features": 10}}]``."""
    outputs: tuple[Input, ...] | None = Constraint(default=None, min_length=1, max_length=64)
    """The layers that the network returns. Default: the last layer. Example: ``["fc"]``."""

    def graph(self) -> "Graph":
        """Return the graph itself; a preset returns its graph."""
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
        """The layers; shared layers get type and args of the first."""
        firsts: dict[str, Layer] = {}
        for number, layer in enumerate(self.layers):
            if layer.shared_with is None:
                firsts[layer.name] = layer
                yield layer
                continue
            first = firsts.get(layer.shared_with)
            if first is None:
                what = "an earlier layer that has no shared_with"
                detail = f"{layer.name!r}: shared_with must name {what}"
                raise WrongAt("layers", number, "shared_with", detail=detail)
            if layer.type not in ("", first.type) or layer.args not in ({}, first.args):
                detail = f"{layer.name!r} calls {first.name!r} again: omit type and args, or repeat"
                raise WrongAt("layers", number, detail=f"{detail} those of {first.name!r}")
            for option in _OF_PARAMETERS:
                if getattr(layer, option) not in (_OPTIONS[option], getattr(first, option)):
                    detail = f"{layer.name!r} uses the parameters of {first.name!r}: set {option}"
                    raise WrongAt("layers", number, option, detail=f"{detail} there")
            options = {option: _OPTIONS[option] for option in _OF_PARAMETERS}
            yield layer.model_copy(update={"type": first.type, "args": first.args, **options})
