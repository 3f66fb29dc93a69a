"""Requests that fit a model, and what is wrong with those that do not."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from engine.core.problems import Findings
from engine.data.batches.rows import Loaded
from glasshouse.errors import FieldProblem
from glasshouse.suggestions import did_you_mean

JSON = "application/json"
NPY = "application/x-npy"
SAFETENSORS = "application/vnd.safetensors"
BINARY = "application/octet-stream"
MAX_PROBLEMS = 20
"""The most problems of one request that are looked for; finding them takes time, too."""

_LISTED = 20
_COMPARED = 200


class BadRequest(Exception):
    """What a client sent does not fit the model."""

    def __init__(self, problems: Sequence[FieldProblem], status: int = 422) -> None:
        """``status``: that of the HTTP answer: 400, 406, 413, 415 or 422."""
        self.problems, self.status = [*problems], status
        super().__init__("; ".join(map(str, self.problems)))


def bad(detail: str, code: str, pointer: str = "", status: int = 422) -> BadRequest:
    """Create the exception for a single problem."""
    return BadRequest([FieldProblem(pointer, detail, code)], status)


def parsed(body: bytes | memoryview) -> Any:
    """Parse JSON.

    Raises:
        BadRequest: it is something else.
    """
    try:
        return orjson.loads(body)
    except ValueError as cause:
        detail = f"the body is not JSON: {str(cause)[:200]}"
        if b"NaN" in bytes(body) or b"Infinity" in bytes(body):
            detail += '; NaN and infinities are the texts "NaN", "Infinity" and "-Infinity"'
        raise bad(detail, "json", status=400) from None


class Problems(Findings):
    """The problems of one request."""

    def problem(self, pointer: str, detail: str, code: str = "invalid") -> None:
        """Add a problem.

        Raises:
            BadRequest: there are as many as are looked for.
        """
        super().problem(pointer, detail, code)
        if len(self.problems) >= MAX_PROBLEMS:
            self.refuse()

    def refuse(self) -> None:
        """Refuse the request if it has problems.

        Raises:
            BadRequest: it has.
        """
        if self.problems:
            raise BadRequest(self.problems)


def listed(names: Iterable[str]) -> str:
    """Return the first names of a list as a text."""
    known = [*names]
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    return f"{', '.join(known[:_LISTED])}{more}"


def similar(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean …?``, or "" if no known name is similar to an unknown one."""
    return did_you_mean(name[:50], [*known][:_COMPARED])


def token(name: str) -> str:
    """Return a name as a part of a JSON Pointer (RFC 6901), shortened if it is very long."""
    return name[:200].replace("~", "~0").replace("/", "~1")


@dataclass(frozen=True)
class PredictForm:
    """How the answer of ``predict`` is written."""

    media_type: str = JSON
    """``application/json``, ``application/x-npy`` or ``application/vnd.safetensors``."""


@dataclass(frozen=True)
class AskedTensor:
    """One output of a request of the Open Inference Protocol."""

    name: str
    """As in the request: ``fc`` or ``fc/value``."""
    layer: str
    field: str
    """``value``, ``id``, ``prob``, ``top_k``, ``top_k_prob``, ``class``, ``top_k_class`` or
    ``lengths``."""
    is_binary: bool
    num_classes: int | None = None
    """The most classes of each row, as texts (the classification extension); None: the tensor."""


@dataclass(frozen=True)
class ProtocolForm:
    """How an answer of the Open Inference Protocol is written."""

    request_id: str | None
    tensors: tuple[AskedTensor, ...]


@dataclass(frozen=True)
class Asked:
    """A request that fits the model."""

    rows: Mapping[str, Loaded]
    """The fields that the outputs depend on, in host memory: float32, already scaled, filled and
    normalized, or int64. All requests for the same outputs have the same fields and dtypes."""
    num_rows: int
    outputs: tuple[str, ...]
    """The layers, or leaves of layers, to return."""
    fields: tuple[tuple[str, ...], ...]
    """For each of the outputs, what to return of it: ``value``, ``id``, ``prob``, ``top_k``."""
    top_k: int | None
    """The number of entries of ``top_k``; None: `engine.inference.classes.TOP_K`."""
    form: PredictForm | ProtocolForm = PredictForm()
    priority: int | None = None
    """Requests with a higher one are computed first; None: that of the head."""
    timeout_s: float | None = None
    """How long the client waits, if its body says so."""
