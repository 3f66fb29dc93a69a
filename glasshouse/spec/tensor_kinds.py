"""The kinds of tensors that a probe records: one table for API, client and command line."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

TensorKind = Literal[
    "output", "input", "output_grad", "param", "param_grad", "update", "optim_state"
]


class KindFacts(NamedTuple):
    """What is true of all tensors of a kind."""

    of: Literal["layer", "parameter"]
    """What has such a tensor. The first axis of a layer's is the batch."""
    in_metrics: bool = True
    """Whether a metric can be computed from it, as ``fc/output_grad``."""


TENSOR_KINDS: Mapping[TensorKind, KindFacts] = {
    "output": KindFacts("layer"),
    "input": KindFacts("layer", in_metrics=False),
    "output_grad": KindFacts("layer"),
    "param": KindFacts("parameter"),
    "param_grad": KindFacts("parameter"),
    "update": KindFacts("parameter"),
    "optim_state": KindFacts("parameter", in_metrics=False),
}
"""The kinds in the order in which they are listed."""
OF_LAYERS: tuple[str, ...] = tuple(kind for kind, it in TENSOR_KINDS.items() if it.of == "layer")
"""The kinds of which a layer has a tensor for each of its leaves."""
LISTED = ", ".join(TENSOR_KINDS)
"""The kinds, for a text."""
