"""The settings of a job that can be changed while it runs, and their paths in the spec.

``optimizer.lr`` is ``optimizer.args.lr`` of the spec, and ``optimizer.sparse.lr`` is
``optimizer.sparse.args.lr``. All other paths are those of the spec.
"""

from collections.abc import Mapping
from typing import Any


def place(path: str) -> tuple[str, ...]:
    """The path of a setting in the spec: ``optimizer.lr`` → ``("optimizer", "args", "lr")``."""
    first, *rest = path.split(".")
    if is_of_sparse(path):
        return (first, "sparse", "args", *rest[1:])
    return (first, "args", *rest) if is_of_optimizer(path) else (first, *rest)


def is_of_optimizer(path: str) -> bool:
    """Whether a setting is an argument of the optimizer."""
    return path.startswith("optimizer.")


def is_of_sparse(path: str) -> bool:
    """Whether a setting is an argument of the optimizer of sparse gradients."""
    return path.startswith("optimizer.sparse.")


def overlay(spec: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a spec with these settings changed."""
    changed = dict(spec)
    for path, value in changes.items():
        *way, last = place(path)
        holder = changed
        for name in way:
            holder[name] = dict(holder.get(name) or {})
            holder = holder[name]
        holder[last] = value
    return changed


def value_of(spec: Mapping[str, Any], path: str) -> Any:
    """The value of a setting in a spec; None if the spec does not set it."""
    found: Any = spec
    for name in place(path):
        found = found.get(name) if isinstance(found, Mapping) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return found  # pyright: ignore[reportUnknownVariableType]
