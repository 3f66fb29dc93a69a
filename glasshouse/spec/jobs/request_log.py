"""The request log of a serve job: which requests are recorded, and what of them."""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Self

from pydantic import Field as Constraint
from pydantic import model_validator

from glasshouse.spec.strict import Spec, WrongAt, repeated
from glasshouse.suggestions import did_you_mean

_LISTED = 20
FieldGlob = Annotated[str, Constraint(min_length=1, max_length=300)]
"""A name of a field or column, or a glob of such names."""


class RequestLog(Spec):
    """Records requests to served models, with their inputs and outputs.

    The service keeps the newest ones: ``GET /jobs/{id}/requests``. A busy replica records as many
    as fit into 1 percent of its time, and counts the others as skipped.
    """

    share: float = Constraint(default=1.0, gt=0, le=1)
    """The share of requests to record, drawn at random for each. Example: ``0.1``."""
    max_requests: int = Constraint(default=1000, ge=1, le=10_000)
    """The most requests that are kept; the oldest are deleted."""
    max_bytes: int = Constraint(default=16 * 2**20, ge=4096, le=2**28)
    """The most bytes that all kept requests may have; the oldest are deleted."""
    max_request_bytes: int = Constraint(default=65_536, ge=256, le=2**20)
    """The most bytes of the inputs of one request, as they were sent and as JSON, and of its
    outputs. What is larger is recorded without its values, and named in ``too_large``. At most a
    quarter of ``max_bytes``."""
    inputs: bool = True
    """Whether to record the values of fields, as they were sent."""
    outputs: bool = True
    """Whether to record what the model returned."""
    redact: tuple[FieldGlob, ...] = Constraint(default=(), max_length=1000)
    """Fields or columns whose values are never stored; globs are allowed. Outputs from which the
    values could be read are not stored either. Example: ``["name", "address*"]``."""

    @model_validator(mode="after")
    def _check_bytes(self) -> Self:
        if 4 * self.max_request_bytes > self.max_bytes:
            most = self.max_bytes // 4
            detail = f"max_request_bytes ({self.max_request_bytes}) is more than a quarter of"
            detail += f" max_bytes ({self.max_bytes}): set it to at most {most}, or raise max_bytes"
            raise WrongAt("max_request_bytes", detail=detail)
        return self

    @model_validator(mode="after")
    def _check_redact(self) -> Self:
        if (again := repeated(self.redact)) is not None:
            detail = f"{self.redact[again]!r} is listed twice: remove one of them"
            raise WrongAt("redact", again, detail=detail)
        if self.redact and not (self.inputs or self.outputs):
            detail = "redact has no effect, because neither inputs nor outputs are recorded: remove"
            raise WrongAt("redact", detail=f"{detail} redact, or set inputs or outputs to true")
        return self

    def unmatched(self, known: Iterable[str]) -> Iterator[tuple[int, str]]:
        """Yield the place of each entry of ``redact`` that matches nothing, and what is wrong.

        ``known``: the names of the fields and columns of all models that are served.
        """
        names = [*dict.fromkeys(known)]
        for number, glob in enumerate(self.redact):
            if any(fnmatchcase(name, glob) for name in names):
                continue
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            detail = f"no served model has a field or column {glob[:100]!r}; they have:"
            detail += f" {', '.join(names[:_LISTED])}{more}"
            yield number, detail + did_you_mean(glob[:50], names[:200])


def named_by(
    globs: Iterable[str], columns: Mapping[str, Iterable[str]]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the fields and the columns that globs name.

    A named field has all of its columns, and a field with a named column counts as named: its
    values may also be sent as a whole.

    Args:
        globs: of ``redact``.
        columns: the columns that each field reads.
    """
    patterns = [*globs]

    def is_named(name: str) -> bool:
        return any(fnmatchcase(name, glob) for glob in patterns)

    found: set[str] = set()
    for field, own in columns.items():
        found.update(own if is_named(field) else filter(is_named, own))
    fields = (field for field, own in columns.items() if not found.isdisjoint(own))
    return frozenset(fields), frozenset(found)
