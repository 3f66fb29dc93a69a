"""Predefined networks: each is a function in its own file that returns a graph for a few sizes."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Self

from pydantic import PrivateAttr, ValidationError, ValidationInfo, field_validator, model_validator

from glasshouse.spec.error_messages import translated
from glasshouse.spec.network import Graph, Layer
from glasshouse.spec.presets.cbow import Cbow, cbow
from glasshouse.spec.presets.lstm_classifier import LstmClassifier, lstm_classifier
from glasshouse.spec.presets.mlp import Mlp, mlp
from glasshouse.spec.presets.mnist_cnn import MnistCnn, mnist_cnn
from glasshouse.spec.presets.recommender import Recommender, recommender
from glasshouse.spec.presets.resnet18 import Resnet18, resnet18
from glasshouse.spec.presets.seq2seq import Seq2seq, seq2seq
from glasshouse.spec.presets.text_cnn import TextCnn, text_cnn
from glasshouse.spec.presets.transformer_classifier import (
    TransformerClassifier,
    transformer_classifier,
)
from glasshouse.spec.presets.transformer_lm import TransformerLm, transformer_lm
from glasshouse.spec.strict import Args, Spec

PresetName = Literal[
    "cbow",
    "lstm_classifier",
    "mlp",
    "mnist_cnn",
    "recommender",
    "resnet18",
    "seq2seq",
    "text_cnn",
    "transformer_classifier",
    "transformer_lm",
]


class _Known(NamedTuple):
    args: type[Spec]
    graph: Callable[[Any], Graph]


PRESETS: Mapping[str, _Known] = {
    "cbow": _Known(Cbow, cbow),
    "lstm_classifier": _Known(LstmClassifier, lstm_classifier),
    "mlp": _Known(Mlp, mlp),
    "mnist_cnn": _Known(MnistCnn, mnist_cnn),
    "recommender": _Known(Recommender, recommender),
    "resnet18": _Known(Resnet18, resnet18),
    "seq2seq": _Known(Seq2seq, seq2seq),
    "text_cnn": _Known(TextCnn, text_cnn),
    "transformer_classifier": _Known(TransformerClassifier, transformer_classifier),
    "transformer_lm": _Known(TransformerLm, transformer_lm),
}


class Preset(Spec):
    """A predefined network. The plan replaces it by its graph of layers."""

    type: Literal["preset"]
    """Selects a predefined network."""
    preset: PresetName
    """The name of the network; ``GET /catalog/presets`` describes them."""
    args: Args = {}
    """Sizes of the network; ``GET /catalog/presets`` has their JSON Schema. Example: ``{"hidden":
    [128, 64]}``."""
    _graph: Graph = PrivateAttr()

    @field_validator("args")
    @classmethod
    def _check_args(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if (name := info.data.get("preset")) is not None:
            model = PRESETS[name].args
            try:
                model.model_validate_json(json.dumps(value))
            except ValidationError as error:
                raise translated(error, model) from None
        return value

    @model_validator(mode="after")
    def _draw(self) -> Self:
        known = PRESETS[self.preset]
        self._graph = known.graph(known.args.model_validate_json(json.dumps(self.args)))
        return self

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of the graph."""
        return self._graph.layers

    @property
    def outputs(self) -> tuple[str, ...] | None:
        """The outputs of the graph."""
        return self._graph.outputs

    def graph(self) -> Graph:
        """Return the graph."""
        return self._graph
