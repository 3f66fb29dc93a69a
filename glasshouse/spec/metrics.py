"""Metrics of training batches and evaluations, computed from tensors of the network."""

from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, PositiveInt, model_validator
from pydantic import Field as Constraint

from glasshouse.spec.strict import Args, Spec, TorchName, WrongAt
from glasshouse.spec.tensor_kinds import TENSOR_KINDS
from glasshouse.suggestions import did_you_mean

Watched = Annotated[
    str,
    Constraint(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}(\.[A-Za-z0-9_]{1,64}){0,8}"
        rf"(/({'|'.join(kind for kind, it in TENSOR_KINDS.items() if it.in_metrics)}))?$"
    ),
]
"""A data field, or a layer or leaf (its output); or a name with a kind: ``fc/output_grad``,
``conv1.weight/param``, ``conv1.weight/param_grad``, ``conv1.weight/update``."""

MetricName = Annotated[str, Constraint(pattern=r"^[A-Za-z_][A-Za-z0-9_.,()/-]{0,199}$")]

OwnType = Literal[
    "accuracy",
    "mean_abs_diff",
    "mean_squared_diff",
    "cosine_similarity",
    "l2_ratio",
    "correct_fraction",
    "mean",
    "l2",
]
OWN: tuple[str, ...] = get_args(OwnType)
"""The built-in types; all other types are classes of torchmetrics."""
ALONE = ("mean", "l2")
"""Types with one input; all others have two."""
RESERVED = ("loss", "lr", "grad_norm", "clipped_steps", "skipped_steps")
RESERVED_PREFIXES = ("loss/", "validation/", "time/", "throughput/", "system/", "output_grad_clip/")


def _check_known(value: str) -> str:
    """Reject unknown lower-case names: the classes of torchmetrics begin with a capital letter."""
    if value not in OWN and not value[0].isupper():
        near = did_you_mean(value, OWN)
        raise ValueError(f"a class of torchmetrics, or one of: {', '.join(OWN)}{near}")
    return value


MetricType = Annotated[TorchName, AfterValidator(_check_known)]


class Metric(Spec):
    """A number computed on the device from tensors of the network.

    ``accuracy`` and classes of torchmetrics are computed over all rows of each evaluation. The
    other types are computed for training batches only.
    """

    type: MetricType
    """A class of torchmetrics, or a built-in type. ``accuracy``, ``correct_fraction``: fraction of
    integer targets that are the index of the highest score. ``mean_abs_diff``,
    ``mean_squared_diff``: mean over all elements of two tensors of the same shape.
    ``cosine_similarity``: of two tensors, each flattened to one vector. ``l2_ratio``: L2 norm of
    the first tensor divided by that of the second. ``mean``, ``l2``: of one tensor. Example:
    ``"MulticlassF1Score"``."""
    args: Args = {}
    """Arguments of a class of torchmetrics, by its names. Example: ``{"num_classes": 10}``."""
    inputs: tuple[Watched, ...] = Constraint(min_length=1, max_length=2)
    """Data fields, layers, leaves, or names with a kind (``fc/output_grad``, ``fc.weight/param``).
    Scores come before their targets. Example: ``["fc", "label"]``."""
    name: MetricName | None = None
    """The name of the series. Default: the type for ``accuracy`` and classes of torchmetrics; for
    other types the type with its inputs, ``mean_abs_diff(fc1,fc2)``. Example: ``"confusion"``."""
    every: PositiveInt | None = None
    """Interval in training steps: due on step 0 and on every n-th step after it. Default: every
    step for built-in types, no training step for classes of torchmetrics. Example: ``25``."""
    top_k: PositiveInt = 1
    """With ``accuracy``: a row is correct if its target is among the k highest scores."""

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        count = 1 if self.type in ALONE else 2
        if len(self.inputs) != count:
            detail = f"{self.type} takes {count} input{'s'[: count - 1]} (got {len(self.inputs)})"
            raise WrongAt("inputs", detail=detail)
        if self.type != "accuracy" and self.top_k != 1:
            detail = f"top_k ({self.top_k}) applies to accuracy only, and type is {self.type!r}"
            raise WrongAt("top_k", detail=f"{detail}: classes of torchmetrics take it in args")
        if self.args and not self.is_of_torchmetrics:
            detail = f"args apply to classes of torchmetrics only, and type is {self.type!r}"
            raise WrongAt("args", detail=f"{detail}: remove args")
        for number, name in enumerate(self.inputs):
            if self.is_evaluated and "/" in name:
                detail = (
                    f"{self.type} compares outputs, and {name!r} is not one: name a layer or field"
                )
                raise WrongAt("inputs", number, detail=detail)
        if self.name in RESERVED or (self.name or "").startswith(RESERVED_PREFIXES):
            raise WrongAt("name", detail=f"the name {self.name!r} is reserved: choose another")
        return self

    @property
    def is_of_torchmetrics(self) -> bool:
        """Whether the type is a class of torchmetrics."""
        return self.type not in OWN

    @property
    def is_evaluated(self) -> bool:
        """Whether it is computed over the rows of each evaluation."""
        return self.type == "accuracy" or self.is_of_torchmetrics

    @property
    def interval(self) -> int | None:
        """The interval in training steps; None: never."""
        return self.every or (None if self.is_of_torchmetrics else 1)

    @property
    def sources(self) -> tuple[str, ...]:
        """The fields, layers, leaves and parameters that it reads, without their kinds."""
        return tuple(name.partition("/")[0] for name in self.inputs)
