"""Figures of training batches and of evaluations: of what goes through the network."""

from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, PositiveInt, model_validator
from pydantic import Field as Constraint

from glasshouse.nearest import did_you_mean
from glasshouse.spec.strict import Args, Spec, TorchName, WrongAt

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
"""The types that are ours; every other one is a class of torchmetrics."""
ALONE = ("mean", "l2")
"""Types of one tensor; the others take two."""
RESERVED = ("loss", "lr", "grad_norm", "clipped_steps", "skipped_steps")
RESERVED_PREFIXES = ("loss/", "validation/", "time/", "throughput/", "system/", "output_grad_clip/")


def _check_known(value: str) -> str:
    """Ours are written small, torchmetrics' classes are not: what a typing error meant is plain."""
    if value not in OWN and not value[0].isupper():
        near = did_you_mean(value, OWN)
        raise ValueError(f"a class of torchmetrics, or one of: {', '.join(OWN)}{near}")
    return value


MetricType = Annotated[TorchName, AfterValidator(_check_known)]


class Metric(Spec):
    """A figure computed on the device from what the network computes.

    Accuracy and the classes of torchmetrics are computed over all rows of each evaluation; the
    others are of training batches only.
    """

    type: MetricType
    """A class of torchmetrics (``MulticlassF1Score``, ``R2Score``), or one of ours. ``accuracy``
    and ``correct_fraction``: of integer targets, how many are the index of the highest score.
    ``mean_abs_diff``, ``mean_squared_diff``: over all elements of two tensors of one shape.
    ``cosine_similarity``: of the two as one long vector each. ``l2_ratio``: the l2 norm of the
    first over that of the second. ``mean``, ``l2``: of one tensor."""
    args: Args = {}
    """Arguments of a class of torchmetrics, by its names."""
    inputs: tuple[Watched, ...] = Constraint(min_length=1, max_length=2)
    """Data fields, layers, leaves, or ``name/kind``. A score comes before its targets."""
    name: MetricName | None = None
    """How it is reported; left out, ``mean_abs_diff(fc1,fc2)``, and the type alone for ``accuracy``
    and classes of torchmetrics."""
    every: PositiveInt | None = None
    """Due on training step 0 and on every n-th step after it. Left out: ours on every step, a class
    of torchmetrics on none."""
    top_k: PositiveInt = 1
    """Of ``accuracy``: a row is right when its target is among the k highest scores."""

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
            if self.is_judged and "/" in name:
                detail = (
                    f"{self.type} compares outputs, and {name!r} is none: name a layer or field"
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
    def is_judged(self) -> bool:
        """Whether it is computed over the rows of each evaluation."""
        return self.type == "accuracy" or self.is_of_torchmetrics

    @property
    def interval(self) -> int | None:
        """Due on every so many training steps; None: on none."""
        return self.every or (None if self.is_of_torchmetrics else 1)

    @property
    def sources(self) -> tuple[str, ...]:
        """The fields, layers, leaves and parameters that it is made of, without their kinds."""
        return tuple(name.partition("/")[0] for name in self.inputs)
