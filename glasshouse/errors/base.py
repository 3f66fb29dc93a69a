"""The root of all error classes, and what is wrong with one field of a request."""

import re
from dataclasses import asdict, dataclass


class GlasshouseError(Exception):
    """Something failed."""

    def __init__(self, detail: str | None = None, /) -> None:
        self.detail = detail or (type(self).__doc__ or "").strip().splitlines()[0]
        super().__init__(self.detail)


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """What is wrong with one field of a request."""

    pointer: str
    """JSON Pointer into the request, e.g. ``/network/layers/3/args/out_channels``."""
    detail: str
    """What is wrong, with the value, and what to change."""
    code: str

    def as_dict(self) -> dict[str, str]:
        """The entry of a problem document's ``errors``."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.pointer}: {self.detail}" if self.pointer else self.detail


def code_of(name: str) -> str:
    """The public code of an error class: its name in snake case."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
