"""Find extensions: the modules of one of our folders, and entry points of installed packages.

An entry point is found only if the operator has installed its package next to the service: no name
from a request, a spec or the network is ever imported.
"""

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, TypeVar

GROUPS = ("glasshouse.formats", "glasshouse.layers", "glasshouse.losses")
"""The groups of entry points that the service reads."""
Base = TypeVar("Base")


class PluginError(Exception):
    """An installed package declares an extension that cannot be used."""


def modules_of(package: ModuleType) -> list[ModuleType]:
    """Import the modules of a package, in the order of their names."""
    names = sorted(found.name for found in iter_modules(package.__path__))
    return [import_module(f"{package.__name__}.{name}") for name in names]


@cache
def installed(group: str) -> dict[str, Any]:
    """Return what the entry points of a group refer to, by name.

    Raises:
        PluginError: one of them cannot be imported, or two have one name.
    """
    found: dict[str, Any] = {}
    for point in sorted(_points(), key=lambda point: point.name):
        if point.group != group:
            continue
        if point.name in found:
            raise PluginError(
                f"two installed packages have an entry point {label(group, point.name)}"
            )
        try:
            found[point.name] = point.load()
        except Exception as cause:
            raise PluginError(
                f"the entry point {label(group, point.name)} cannot be loaded from {point.value}: "
                f"{type(cause).__name__}: {cause}"
            ) from cause
    return found


def installed_classes(group: str, base: type[Base], known: Iterable[str]) -> dict[str, type[Base]]:
    """Return the classes that the entry points of a group refer to, by name.

    Raises:
        PluginError: one of them is no subclass of ``base``, or has the name of a known one.
    """
    found = installed(group)
    refuse_known(group, found, known)
    for name, item in found.items():
        if not isinstance(item, type) or not issubclass(item, base):
            raise PluginError(
                f"the entry point {label(group, name)} must refer to a subclass of {base.__name__}"
            )
    return found


@cache
def _points() -> tuple[EntryPoint, ...]:
    everything = entry_points()  # reads the metadata of every installed package once
    return tuple(point for group in GROUPS for point in everything.select(group=group))


def label(group: str, name: str) -> str:
    """Return how a message names an entry point."""
    return f"{name!r} of the group {group!r}"


def refuse_known(group: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse entry points with the names of what the service has.

    Raises:
        PluginError: there is one.
    """
    for name in {*known}.intersection(names):
        raise PluginError(f"the entry point {label(group, name)} has the name of an included one")
