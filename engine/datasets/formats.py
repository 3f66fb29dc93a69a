"""The registry of file formats: those of the readers, and those of installed packages.

The API, the catalog and the reader process use it. Needs numpy, but no large library.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

from engine.datasets import readers
from engine.datasets.reading import Format
from glasshouse import plugins
from glasshouse.spec.data import BUILTINS, SIZE

GROUP = "glasshouse.formats"
MAX_NAME_LENGTH = 40
OPTIONS: dict[str, dict[str, Any]] = {
    "header": {
        "type": ["boolean", "null"],
        "default": None,
        "description": "Whether the first row names the columns. Default: it is detected.",
    },
    "resize": {
        "type": ["string", "null"],
        "default": None,
        "pattern": SIZE,
        "description": "The height x width to resize images to, such as 32x32.",
    },
}
"""The JSON Schemas of the options of formats."""


@cache
def formats() -> Mapping[str, Format]:
    """Return all formats by name, in alphabetical order.

    Raises:
        PluginError: an installed package registers a format that cannot be used.
    """
    found: dict[str, Format] = {
        item.name: item
        for module in plugins.modules_of(readers)
        for item in getattr(module, "FORMATS", ())
    }
    added = plugins.installed(GROUP)
    plugins.refuse_known(GROUP, added, found)
    for name, item in added.items():
        if not isinstance(item, Format) or item.name != name or len(name) > MAX_NAME_LENGTH:
            told = plugins.label(GROUP, name)
            raise plugins.PluginError(
                f"the entry point {told} must refer to a Format with the same name, of at most "
                f"{MAX_NAME_LENGTH} characters"
            )
        found[name] = item
    return MappingProxyType(dict(sorted(found.items())))


def inferred(name: str | None, media_type: str | None = None) -> str | None:
    """Infer a format from a media type or the longest suffix of a file name; None: unknown."""
    lowered = (name or "").lower()
    for item in formats().values():
        if media_type in item.media_types:
            return item.name
    fitting = [
        (len(suffix), item.name)
        for item in formats().values()
        for suffix in item.suffixes
        if lowered.endswith(suffix)
    ]
    return max(fitting)[1] if fitting else None


def having(option: str) -> list[str]:
    """Return the names of the formats with an option."""
    return [item.name for item in formats().values() if option in item.options]


def catalog() -> list[dict[str, Any]]:
    """Return the entries of the catalog: the built-in datasets, and the formats of files."""
    return [
        *(_entry("builtin", name, summary) for name, summary in BUILTINS.items()),
        *(
            _entry("format", item.name, item.summary, item.options)
            | {"suffixes": [*item.suffixes], "media_types": [*item.media_types]}
            for item in formats().values()
        ),
    ]


def _entry(kind: str, name: str, summary: str, options: Sequence[str] = ()) -> dict[str, Any]:
    properties = {option: OPTIONS[option] for option in options}
    schema = {"type": "object", "properties": properties, "required": []}
    return {"name": name, "kind": kind, "summary": summary, "schema": schema, "inputs": None}
