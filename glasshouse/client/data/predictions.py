"""What served models answer. Makes no requests."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from glasshouse import jsonio
from glasshouse.client.data.predict_bodies import SAFETENSORS, listed
from glasshouse.client.data.tensors import Array, read_outputs
from glasshouse.errors import APIError

NON_FINITE = "glasshouse-non-finite"
_TIMING = re.compile(r"(\w+);dur=([\d.]+)")
_CLASSES = ("class", "id")


class Predicted(ABC):
    """What a network computed for the rows of one request."""

    outputs: dict[str, Array | list[Array]]
    """Arrays by ``<layer>/<field>``, with one entry per row. Of an output with a value per step
    whose rows differ in length: a list with an array for each row."""
    timing: dict[str, float]
    """``queue_ms``, the time in which the request waited, and ``compute_ms``."""
    non_finite: tuple[str, ...]
    """The names of the outputs that have NaN or Inf."""

    def __init__(
        self,
        outputs: Mapping[str, Array | list[Array]],
        *,
        timing: Mapping[str, float],
        non_finite: Sequence[str] = (),
    ) -> None:
        self.outputs, self.timing = dict(outputs), dict(timing)
        self.non_finite = tuple(non_finite)

    def __getitem__(self, name: str) -> Any:
        """Return an output by ``<layer>/<field>``, or the value of a layer by its name.

        Raises:
            KeyError: there is no such output.
        """
        for key in (name, f"{name}/value"):
            if key in self.outputs:
                return self.outputs[key]
        raise KeyError(f"there is no output {name!r}; there are: {', '.join(self.outputs)}")

    @property
    def classes(self) -> Any:
        """The predicted class of each row: its name, or its number if the classes have no names.

        Of the first output that has classes. For others: ``prediction["<layer>/class"]``.

        Raises:
            AttributeError: no output has ``id``: the model is no classifier, or ``fields`` left it
                out.
        """
        for title in _CLASSES:
            for name, array in self.outputs.items():
                if name.endswith(f"/{title}"):
                    return array
        found = ", ".join(self.outputs)
        raise AttributeError(f"no output has classes (there are: {found}); ask for fields=['id']")

    @property
    @abstractmethod
    def origin(self) -> dict[str, str | int]:
        """What answered: ``model`` and ``version``, or ``job`` and ``step``."""

    def as_json(self) -> dict[str, Any]:
        """Return everything as a JSON-like document."""
        return {
            "outputs": {name: listed(found) for name, found in self.outputs.items()},
            **self.origin,
            "non_finite": list(self.non_finite),
            "timing": self.timing,
        }

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{name} {'rows' if isinstance(found, list) else list(found.shape)}"
            for name, found in self.outputs.items()
        )
        origin = ":".join(map(str, self.origin.values()))
        return f"{type(self).__name__}({origin}, {shown})"


class Prediction(Predicted):
    """What a served model computed for the rows of one request.

    ``prediction["fc"]`` is the value of the layer ``fc``, ``prediction["fc/class"]`` the predicted
    class of each row.
    """

    model: str
    """The name of the model."""
    version: int
    """The number of the version that answered."""

    def __init__(
        self,
        outputs: Mapping[str, Array | list[Array]],
        *,
        model: str,
        version: int,
        timing: Mapping[str, float],
        non_finite: Sequence[str] = (),
    ) -> None:
        super().__init__(outputs, timing=timing, non_finite=non_finite)
        self.model, self.version = model, version

    @property
    def origin(self) -> dict[str, str | int]:
        """The model and the version."""
        return {"model": self.model, "version": self.version}


class JobPrediction(Predicted):
    """What a training job computed for the rows of one request, with its current weights.

    The outputs are read as those of a `Prediction`.
    """

    job: str
    """The id of the job."""
    step: int
    """The number of updates that the weights had."""

    def __init__(
        self,
        outputs: Mapping[str, Array | list[Array]],
        *,
        job: str,
        step: int,
        timing: Mapping[str, float],
        non_finite: Sequence[str] = (),
    ) -> None:
        super().__init__(outputs, timing=timing, non_finite=non_finite)
        self.job, self.step = job, step

    @property
    def origin(self) -> dict[str, str | int]:
        """The job and the step."""
        return {"job": self.job, "step": self.step}


def read_prediction(content: bytes, headers: Mapping[str, str]) -> Prediction:
    """Decode the response of a served model.

    Raises:
        APIError: it is no prediction.
    """
    model, number, found = _decoded(content, headers, "x-model-version")
    return Prediction(found.pop("outputs"), model=model, version=number, **found)


def read_job_prediction(content: bytes, headers: Mapping[str, str]) -> JobPrediction:
    """Decode the response of a training job.

    Raises:
        APIError: it is no prediction.
    """
    job, number, found = _decoded(content, headers, "x-job-step")
    return JobPrediction(found.pop("outputs"), job=job, step=number, **found)


def _decoded(
    content: bytes, headers: Mapping[str, str], header: str
) -> tuple[str, int, dict[str, Any]]:
    """Return the two parts of a header, and what each prediction has.

    Raises:
        APIError: it is no prediction.
    """
    kind = headers.get("content-type", "").partition(";")[0]
    try:
        if kind == SAFETENSORS:
            outputs = _of_tensors(content)
            names = [name.strip() for name in headers.get(NON_FINITE, "").split(",") if name]
        else:
            document = jsonio.loads(content)
            names = document.get("non_finite", [])
            outputs = {
                name: _read(item, is_finite=name not in names)
                for name, item in document["outputs"].items()
            }
        origin, _, number = headers[header].rpartition(":")
        timed = _TIMING.findall(headers.get("server-timing", ""))
        timing = {f"{name}_ms": float(ms) for name, ms in timed}
        parts = {"outputs": outputs, "timing": timing, "non_finite": names}
        return origin, int(number), parts
    except (KeyError, TypeError, ValueError) as cause:
        shown = kind or "no media type"
        raise APIError(f"the response ({shown}) is not a prediction: {cause!r:.200}") from cause


def _of_tensors(content: bytes) -> dict[str, Array | list[Array]]:
    """Outputs of a safetensors file. Those with a value per step are padded there."""
    arrays = read_outputs(content)
    found: dict[str, Array | list[Array]] = {}
    for name, array in arrays.items():
        layer, _, title = name.rpartition("/")
        lengths = arrays.get(f"{layer}/lengths")
        if title == "lengths":
            continue
        found[name] = array if lengths is None else _cut(array, lengths)
    return found


def _cut(array: Array, lengths: Array) -> Array | list[Array]:
    """The steps of each row, without padding."""
    sizes = [int(size) for size in lengths]
    if len(set(sizes)) == 1:
        return array[:, : sizes[0]]
    return [row[:size] for row, size in zip(array, sizes, strict=True)]


def _read(value: Any, *, is_finite: bool) -> Array | list[Array]:
    """Convert nested lists of a JSON response to an array; of ragged rows to one for each row."""
    numbers = value if is_finite else _numbers(value)
    try:
        return _array(numbers)
    except ValueError:
        return [_array(row) for row in numbers]


def _array(value: Any) -> Array:
    array = np.array(value)
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def _numbers(value: Any) -> Any:
    """Replace the names of NaN and Inf in nested lists by the numbers."""
    if isinstance(value, list):
        return [_numbers(item) for item in cast("list[Any]", value)]
    return jsonio.number(value)
