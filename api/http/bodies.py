"""Read and validate JSON bodies strictly, with a pointer to each mistake."""

import json
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from fastapi import Request
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool

from api.http import problems
from glasshouse import jsonio
from glasshouse.errors import (
    FieldProblem,
    InvalidRequest,
    InvalidSpec,
    MalformedJson,
    ServiceError,
    Unprocessable,
    UnsupportedMedia,
)
from glasshouse.spec import KINDS, AnyJob, JobSpec, Spec
from glasshouse.spec.error_messages import problems_in

T = TypeVar("T")
Checked = TypeVar("Checked", bound=BaseModel)
_PARSED_HERE_BYTES = 128 * 1024
"""Larger bodies are parsed in a thread, so that other requests do not wait."""
_MAX_PROBLEMS = 100


class Body(Spec):
    """The strict base class of request bodies other than job specs."""


class Parsed(Generic[T]):
    """A validated body."""

    __slots__ = ("raw", "value")

    def __init__(self, raw: bytes, value: T) -> None:
        self.raw = raw
        self.value = value


def media_type(request: Request) -> str:
    """Return the body's media type without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_json_bytes(request: Request) -> bytes:
    """Return the whole body of a JSON request. RequestGuard limits its size.

    Raises:
        UnsupportedMedia: The content type is not JSON.
    """
    kind = media_type(request)
    if kind != "application/json" and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        shown = repr(kind[:100]) if kind else "missing"
        raise UnsupportedMedia(f"Content-Type must be application/json; it is {shown}.")
    return await request.body()


_job_adapter: TypeAdapter[AnyJob] = TypeAdapter(JobSpec)


def _roots(adapter: Any) -> tuple[type[BaseModel], ...]:
    """Return the models that a body may match, for error messages."""
    if adapter is _job_adapter:
        return KINDS
    return (adapter,) if isinstance(adapter, type) else ()


def body_of(
    adapter: TypeAdapter[T] | type[T], wrong: type[Unprocessable] = InvalidRequest
) -> Callable[[Request], Awaitable[Parsed[T]]]:
    """Return a dependency that reads and validates a JSON body."""
    checked: TypeAdapter[T] = adapter if isinstance(adapter, TypeAdapter) else TypeAdapter(adapter)
    roots = _roots(adapter)

    async def read(request: Request) -> Parsed[T]:
        raw = await read_json_bytes(request)
        if len(raw) > _PARSED_HERE_BYTES:
            return Parsed(raw, await run_in_threadpool(parse, checked, raw, wrong, roots))
        return Parsed(raw, parse(checked, raw, wrong, roots))

    return read


parse_job_body = body_of(_job_adapter, InvalidSpec)
"""Dependency that reads a job spec."""


def parse_spec(spec: Mapping[str, Any]) -> AnyJob:
    """Validate a stored or derived job spec as strictly as a request body.

    Raises:
        InvalidSpec: It is not valid; the problems have pointers and reasons.
    """
    return parse(_job_adapter, jsonio.dumps(spec).encode(), InvalidSpec, _roots(_job_adapter))


def parse(
    adapter: TypeAdapter[T],
    raw: bytes,
    wrong: type[Unprocessable] = InvalidRequest,
    roots: tuple[type[BaseModel], ...] = (),
) -> T:
    """Validate a JSON text. ``roots`` are the models that it may match.

    Raises:
        MalformedJson: It is not JSON.
        Unprocessable: (``wrong``) It is JSON but not valid; the problems have pointers and reasons.
    """
    content = load(raw, wrong)
    try:
        return adapter.validate_json(raw)
    except ValidationError as error:
        found = error.errors(include_url=False)
        if any(entry["type"] == "json_invalid" for entry in found):
            raise MalformedJson(f"The body is not JSON: {found[0]['msg']}.") from None
        problems = problems_in(found[: 10 * _MAX_PROBLEMS], content, *roots, most=_MAX_PROBLEMS)
        raise refusal(wrong, problems) from None


def parse_as(model: type[Checked], content: Any) -> Checked:
    """Validate a part of a request as strictly as a whole body.

    Raises:
        InvalidSpec: It is not valid; the problems have pointers and reasons.
    """
    return parse(TypeAdapter(model), jsonio.dumps(content).encode(), InvalidSpec, (model,))


def load(raw: bytes, wrong: type[Unprocessable] = InvalidRequest) -> Any:
    """Decode a JSON text. Report bare NaN, Infinity and overflows such as 1e999 by their pointers.

    Raises:
        MalformedJson: It is not JSON.
        Unprocessable: (``wrong``) It contains NaN or Inf.
    """
    suspicious = False

    def read_float(text: str) -> float:
        nonlocal suspicious
        value = float(text)
        suspicious = suspicious or not math.isfinite(value)
        return value

    def read_constant(text: str) -> float:
        nonlocal suspicious
        suspicious = True
        return float(text)

    try:
        content = json.loads(raw, parse_float=read_float, parse_constant=read_constant)
    except RecursionError:
        raise MalformedJson("The body is nested too deeply.") from None
    except ValueError as error:
        raise MalformedJson(f"The body is not JSON: {error}.") from None
    if suspicious:
        detail = 'numbers must be finite; where an infinity is allowed write "Infinity"'
        found = [
            FieldProblem(problems.pointer(place), detail, "finite_number")
            for place in _nonfinite(content, ())
        ]
        raise refusal(wrong, found[:_MAX_PROBLEMS])
    return content


def refusal(wrong: type[Unprocessable], found: list[FieldProblem]) -> ServiceError:
    """Return the 422 error with all problems. Its detail is the first of them."""
    first = found[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return wrong(f"{first}{more}", problems=found)


def _nonfinite(value: Any, place: tuple[int | str, ...]) -> Iterator[tuple[int | str, ...]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield place
    elif isinstance(value, dict):
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]
            yield from _nonfinite(item, (*place, str(key)))  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(value, list):
        for index, item in enumerate(value):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            yield from _nonfinite(item, (*place, index))


def described(
    *models: type[BaseModel], media: tuple[str, ...] = ("application/json",), example: Any = None
) -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route whose body a dependency of this module reads."""
    refs = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in models]
    schema = refs[0] if len(refs) == 1 else {"oneOf": refs}
    content: dict[str, Any] = {"schema": schema}
    if example is not None:
        content["example"] = example
    BODIES.update(models)
    return {"requestBody": {"required": True, "content": dict.fromkeys(media, content)}}


BODIES: set[type[BaseModel]] = set()
"""The models of request bodies, for the OpenAPI document."""
