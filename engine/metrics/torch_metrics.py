"""Metrics of torchmetrics, by its names and arguments.

torchmetrics takes a second to import, so it is imported only if a job names one of its classes.
Knows torchmetrics; knows nothing of jobs or files.

The code has no shape suffixes: shapes depend on the metric's class.
"""

import importlib
import importlib.metadata
import inspect
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.core import arguments
from engine.core.arguments import Parameter
from engine.core.problems import one
from engine.distributed.group import ALONE, Group
from engine.metrics.metrics import num_correct
from glasshouse.spec import Field, IntegerField, IntegerSequenceField, Metric
from glasshouse.spec.metrics import OWN
from glasshouse.suggestions import did_you_mean

MAX_SERIES = 200
"""A vector of at most this many values becomes one series per value; a longer one is kept whole."""
MAX_NUMBER = 1_000_000
"""Largest integer argument: classes, thresholds, bins."""
_COUNTED_TARGETS = ("Binary", "Multilabel")


class Unusable(NamedTuple):
    """Why torchmetrics cannot be imported here, and what to do about it."""

    reason: str
    fix: str


@cache
def unusable() -> Unusable | None:
    """Import torchmetrics; return why it is unusable, or None.

    It imports torchvision and other packages if they are installed. One that does not fit torch
    makes all metrics unusable. torchmetrics checks pip's metadata at import, so this cannot be
    avoided.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("torchmetrics")
    except Exception as error:  # an incompatible package may raise anything
        return _why(error)
    return None


def _why(error: Exception) -> Unusable:
    """Return which package made the import fail: the first that torchmetrics called."""
    said = f"{type(error).__name__}: {(str(error).strip() or 'no reason').splitlines()[0][:300]}"
    packages = [
        str(frame.f_globals.get("__name__")).partition(".")[0]
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    called = packages[packages.index("torchmetrics") :] if "torchmetrics" in packages else []
    for package in called:
        if package not in ("torchmetrics", "importlib"):
            fails = f"{_versioned(package)} fails beside torch {torch.__version__} ({said})"
            return Unusable(
                f"torchmetrics imports {package}, since it is installed, and {fails}",
                f"pip uninstall {package}, or install its build for torch {torch.__version__}; "
                "then start the service again",
            )
    fix = "pip install 'glasshouse[server]', then start the service again"
    return Unusable(f"torchmetrics cannot be imported ({said})", fix)


def _versioned(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package


@cache
def metric_classes() -> dict[str, type[Any]]:
    """Return the classes that compare two tensors, by name; none if torchmetrics is unusable."""
    if unusable() is not None:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = (
            importlib.import_module("torchmetrics.classification"),
            importlib.import_module("torchmetrics.regression"),
        )
        found = {name: getattr(module, name) for module in modules for name in module.__all__}
        text = importlib.import_module("torchmetrics.text.perplexity")
    found["Perplexity"] = text.Perplexity
    base = importlib.import_module("torchmetrics").Metric
    return {name: cls for name, cls in sorted(found.items()) if _is_offered(cls, base)}


def _is_offered(cls: Any, base: type) -> bool:
    """Return whether a class takes two tensors and creates an instance of itself."""
    if not isinstance(cls, type) or not issubclass(cls, base):
        return False
    taken = list(inspect.signature(cls.update).parameters.values())[1:]
    return len(taken) == 2 and all(item.kind is item.POSITIONAL_OR_KEYWORD for item in taken)


@cache
def metric_parameters(name: str) -> dict[str, Parameter]:
    """Return the arguments of an offered class, by name.

    Arguments for target checks and those of its parent class are excluded: a spec cannot set them.
    """
    known = arguments.read_signature(metric_classes()[name].__init__)
    known.pop("validate_args", None)
    return known


def checked_arguments(metric: Metric, pointer: str) -> dict[str, Any]:
    """Return the arguments of a metric as Python values.

    Raises:
        SpecProblems: there is no such class or argument, or torchmetrics cannot be imported.
    """
    if (why := unusable()) is not None:
        detail = f"{metric.type} cannot be computed here: {why.reason}: {why.fix}"
        raise one(f"{pointer}/type", detail, "unavailable")
    if metric.type not in metric_classes():
        raise one(f"{pointer}/type", _unknown(metric.type), "unknown")
    known = metric_parameters(metric.type)
    args = arguments.check(known, dict(metric.args), f"{pointer}/args", metric.type)
    for name in arguments.missing(known, args):
        raise one(f"{pointer}/args/{name}", f"{metric.type} needs the argument {name!r}", "missing")
    for name, value in args.items():
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            detail = f"{name} is {value}; it may be at most {MAX_NUMBER}"
            raise one(f"{pointer}/args/{name}", detail, "too_large")
    return args


def _unknown(name: str) -> str:
    kinds = [f"{task}{name}" for task in ("Binary", "Multiclass", "Multilabel")]
    meant = [item for item in kinds if item in metric_classes()]
    if meant:
        return f"{name} stands for several metrics: name one of {', '.join(meant)}"
    meant = did_you_mean(name, [*metric_classes(), *OWN])
    hint = meant or "; GET /catalog/metrics lists what there is"
    return f"torchmetrics has no metric {name!r} of two tensors{hint}"


def build(metric: Metric, args: Mapping[str, Any], *, checks: bool) -> Any:
    """Create a metric from arguments that have been checked.

    ``checks``: validate each batch's targets, which waits for the device.
    """
    cls = metric_classes()[metric.type]
    more = (
        {}
        if "validate_args" not in inspect.signature(cls).parameters
        else {"validate_args": checks}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it keeps all scores: the plan has counted them
        return cls(**args, **more, sync_on_compute=False)


def num_values(metric: Metric, args: Mapping[str, Any]) -> int | None:
    """Return how many target values a classification accepts; None: not a classification."""
    if metric.type.startswith("Multiclass"):
        return args.get("num_classes")
    return 2 if metric.type.startswith(_COUNTED_TARGETS) else None


class Given(NamedTuple):
    """The result of a metric."""

    series: dict[str, Tensor]
    """Scalars by the name of their series."""
    tensors: dict[str, Tensor]
    """Results that are not scalars: matrices, curves, long vectors."""


def as_given(name: str, result: Any) -> Given:
    """Split a result into series and tensors.

    A scalar is ``name``. A vector, or a tuple of scalars, is ``name/0``, ``name/1`` … All else
    stays whole; the items of a tuple are ``name/0`` …
    """
    parts = dict(_parts(name, result))
    if all(item.dim() == 0 for item in parts.values()):
        return Given(parts, {})
    only = parts.get(name)
    if only is not None and only.dim() == 1 and len(only) <= MAX_SERIES:
        return Given({f"{name}/{place}": item for place, item in enumerate(only)}, {})
    return Given({}, parts)


def _parts(name: str, result: Any) -> list[tuple[str, Tensor]]:
    if isinstance(result, Tensor):
        return [(name, result)]
    numbered = enumerate(result)
    return [part for place, item in numbered for part in _parts(f"{name}/{place}", item)]


class RunningMetric:
    """An active metric: takes batches and computes the result of all of them."""

    def __init__(self, name: str, metric: Metric, fields: Mapping[str, Field]) -> None:
        """Create it; targets that ``fields`` and the plan have checked are not checked again."""
        self.name = name
        self.metric = metric
        args = checked_arguments(metric, "")
        most, field = num_values(metric, args), fields.get(metric.inputs[1])
        is_checked = (
            isinstance(field, IntegerField | IntegerSequenceField)
            and most is not None
            and field.dim is not None
            and field.dim <= most
        )
        self._made = made = build(metric, args, checks=not is_checked)
        # Accumulate sums in float64: over many rows float32 would lose the last ones. Each state
        # replaces the one of its name and keeps its reduction over processes.
        for key, state in made.metric_state.items():
            if isinstance(state, Tensor) and state.is_floating_point():
                made.add_state(
                    key,
                    default=state.to(torch.float64),
                    dist_reduce_fx=made._reductions[key],
                    persistent=made._persistent[key],
                )

    def reset(self) -> None:
        """Reset the state."""
        self._made.reset()

    def update(self, operands: Sequence[Tensor]) -> None:
        """Add a batch: scores and targets, on any device."""
        scores, target = (
            item.to(torch.float32) if item.is_floating_point() and item.itemsize < 4 else item
            for item in operands
        )
        if self.metric.type.startswith(_COUNTED_TARGETS) and target.is_floating_point():
            target = target.to(torch.int64)
        self._made.to(scores.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._made.update(scores, target)

    def compute(self, group: Group = ALONE) -> Given:
        """Return the result of all batches, of all processes of ``group``."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # classes without a row; the value is NaN or 0
            with self._made.sync_context(
                should_sync=group.num_shares > 1, process_group=group.other_rows()
            ):
                return as_given(self.name, self._made.compute())

    def of_batch(self, operands: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the result of one batch alone."""
        self.reset()
        self.update(operands)
        series = self.compute().series
        self.reset()
        return series

    @property
    def num_kept(self) -> int:
        """Return the bytes of state that grow with the batches."""
        lists = [item for item in self._made.metric_state.values() if isinstance(item, list)]
        return sum(part.nbytes for item in lists for part in item)


class RunningAccuracy:
    """The accuracy of all batches; exact for any batch size."""

    def __init__(self, name: str, metric: Metric) -> None:
        self.name = name
        self.metric = metric
        self.reset()

    def reset(self) -> None:
        """Reset the counts."""
        self._num_correct: Tensor | float = 0.0
        self._num_rows = 0

    def update(self, operands: Sequence[Tensor]) -> None:
        """Add a batch: scores and targets, on any device."""
        scores, target = operands
        correct = num_correct(scores, target, self.metric.top_k)
        self._num_correct = self._num_correct + correct.to(torch.float64)
        self._num_rows += len(target)

    def compute(self, group: Group = ALONE) -> Given:
        """Return the fraction of correct rows of all batches, of all processes of ``group``."""
        correct = torch.as_tensor(self._num_correct, dtype=torch.float64)
        correct, rows = group.sum_of_rows(
            torch.stack([correct, torch.full_like(correct, self._num_rows)])
        )
        return Given({self.name: correct / rows}, {})


def running(
    name: str, metric: Metric, fields: Mapping[str, Field]
) -> RunningMetric | RunningAccuracy:
    """Return what computes a metric of evaluations."""
    if metric.is_of_torchmetrics:
        return RunningMetric(name, metric, fields)
    return RunningAccuracy(name, metric)


def main() -> None:
    """Print which torchmetrics is used; or why none is and, on a second line, what to do."""
    why = unusable()
    sys.stdout.write("\n".join(why or [_versioned("torchmetrics")]) + "\n")
    sys.exit(why is not None)


if __name__ == "__main__":
    main()
