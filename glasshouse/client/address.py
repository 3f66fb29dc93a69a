"""Where the service is, and the key it wants: arguments, environment, or the runtime file."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from glasshouse.errors import APIConnectionError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class Address:
    """A service and the key to use there."""

    url: str
    """Without a slash at its end."""
    api_key: str | None

    def __repr__(self) -> str:
        return f"Address(url={self.url!r})"  # the key stays out of logs

    @property
    def is_local(self) -> bool:
        """Whether the service is on this machine, where no proxy should stand between."""
        return urlsplit(self.url).hostname in LOOPBACK


def home_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of the local service: ``$GLASSHOUSE_HOME``, or ``~/.glasshouse``."""
    return Path(environ.get("GLASSHOUSE_HOME") or "~/.glasshouse").expanduser().absolute()


def read_runtime(home: Path) -> dict[str, Any]:
    """Read what a running service wrote about itself; empty when there is nothing readable."""
    try:
        value = json.loads((home / "runtime.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def is_stopped(runtime: Mapping[str, Any]) -> bool:
    """Whether the service that wrote this has been stopped since: it takes its process id out."""
    return bool(runtime) and runtime.get("pid", 0) is None


def stopped_text(home: Path) -> str:
    """What to say of a service that was stopped."""
    return f"the service of {home} was stopped. Start it again with 'glasshouse up'"


def find_service(
    url: str | None = None,
    api_key: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Address:
    """Find the service: arguments first, then the environment, then the runtime file.

    The key of the runtime file is only ever sent to the address that stands beside it.

    Raises:
        APIConnectionError: nothing says where a service is, or the one of this machine was stopped.
    """
    home = home_dir(environ)
    runtime = read_runtime(home)
    named = url or environ.get("GLASSHOUSE_URL")
    if not named and is_stopped(runtime):
        raise APIConnectionError(f"{stopped_text(home)}, or set GLASSHOUSE_URL.")
    found = named or runtime.get("url")
    if not found:
        raise APIConnectionError(
            f"no running service was found: there is no {home / 'runtime.json'}. Start one with "
            "'glasshouse up', or set GLASSHOUSE_URL and GLASSHOUSE_API_KEY."
        )
    found = _checked(str(found))
    key = api_key or environ.get("GLASSHOUSE_API_KEY")
    if not key and found == str(runtime.get("url", "")).rstrip("/"):
        key = runtime.get("api_key")
    return Address(found, key or None)


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise APIConnectionError(
            f"{url!r} is not the address of a service; write it like http://127.0.0.1:8420"
        )
    return url.rstrip("/")
