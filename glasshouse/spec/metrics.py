"""Figures of each training batch: of what goes through the network, and of its parameters."""

from typing import Annotated, Literal, Self

from pydantic import Field as Constraint
from pydantic import PositiveInt, model_validator

from glasshouse.spec.strict import Spec

Watched = Annotated[
    str,
    Constraint(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}(\.[A-Za-z0-9_]{1,64}){0,8}"
        r"(/(output|output_grad|param|param_grad|update))?$"
    ),
]
"""A data field, a layer or a leaf of one (its output); or ``fc/output_grad``,
``conv1.weight/param``, ``conv1.weight/param_grad``, ``conv1.weight/update``."""

MetricName = Annotated[str, Constraint(pattern=r"^[A-Za-z_][A-Za-z0-9_.,()/-]{0,199}$")]

MetricType = Literal[
    "accuracy",
    "mean_abs_diff",
    "mean_squared_diff",
    "cosine_similarity",
    "l2_ratio",
    "correct_fraction",
    "mean",
    "l2",
]
ALONE = ("mean", "l2")
"""Types of one tensor; the others take two."""
RESERVED = ("loss", "lr", "grad_norm", "clipped_steps", "skipped_steps")
RESERVED_PREFIXES = ("loss/", "validation/", "time/", "throughput/", "system/", "output_grad_clip/")


class Metric(Spec):
    """A figure computed on the device from what a training step computes.

    Accuracy is also computed over the whole of each evaluation; the others are not.
    """

    type: MetricType
    """``accuracy`` and ``correct_fraction``: of integer targets, how many are the index of the
    highest score. ``mean_abs_diff``, ``mean_squared_diff``: over all elements of two tensors of one
    shape. ``cosine_similarity``: of the two as one long vector each. ``l2_ratio``: the l2 norm of
    the first over that of the second. ``mean``, ``l2``: of one tensor."""
    inputs: tuple[Watched, ...] = Constraint(min_length=1, max_length=2)
    """Data fields, layers, leaves, or ``name/kind``. A score comes before its targets."""
    name: MetricName | None = None
    """How it is reported; left out, ``mean_abs_diff(fc1,fc2)``, and ``accuracy``."""
    every: PositiveInt = 1
    """Due on step 0 and on every n-th step after it."""
    top_k: PositiveInt = 1
    """Of ``accuracy``: a row is right when its target is among the k highest scores."""

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        count = 1 if self.type in ALONE else 2
        if len(self.inputs) != count:
            raise ValueError(f"{self.type} takes {count} input{'s'[: count - 1]}")
        if self.type != "accuracy" and self.top_k != 1:
            raise ValueError("top_k is of accuracy only")
        if self.type == "accuracy" and any("/" in name for name in self.inputs):
            raise ValueError("accuracy compares outputs: name a layer and a data field")
        if self.name in RESERVED or (self.name or "").startswith(RESERVED_PREFIXES):
            raise ValueError(f"the name {self.name!r} is taken; choose another")
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        """The fields, layers, leaves and parameters that it is made of, without their kinds."""
        return tuple(name.partition("/")[0] for name in self.inputs)
