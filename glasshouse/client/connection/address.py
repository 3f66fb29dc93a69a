"""The address and API key of the service: from arguments, environment or the runtime file."""

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
    """The address of a service and its API key."""

    url: str
    """Without a trailing slash."""
    api_key: str | None

    def __repr__(self) -> str:
        return f"Address(url={self.url!r})"  # keep the key out of logs

    @property
    def is_local(self) -> bool:
        """Whether the service is on this machine, so that proxies are not used."""
        return urlsplit(self.url).hostname in LOOPBACK

    @property
    def is_encrypted(self) -> bool:
        """Whether requests use TLS."""
        return urlsplit(self.url).scheme == "https"


def home_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of the local service: ``$GLASSHOUSE_HOME``, or ``~/.glasshouse``."""
    return Path(environ.get("GLASSHOUSE_HOME") or "~/.glasshouse").expanduser().absolute()


def read_runtime(home: Path) -> dict[str, Any]:
    """Read the runtime file of a service; empty if it is missing or unreadable."""
    try:
        value = json.loads((home / "runtime.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def is_stopped(runtime: Mapping[str, Any]) -> bool:
    """Whether the service was stopped: it then removes its process id from the runtime file."""
    return bool(runtime) and runtime.get("pid", 0) is None


def stopped_text(home: Path) -> str:
    """The message for a service that was stopped."""
    return f"the service in {home} is stopped. Start it with 'glasshouse up'"


def find_service(
    url: str | None = None,
    api_key: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Address:
    """Find the service: arguments first, then the environment, then the runtime file.

    The key of the runtime file is used only with the address in the same file.

    Raises:
        APIConnectionError: no address is configured, or the local service is stopped.
    """
    home = home_dir(environ)
    runtime = read_runtime(home)
    named = url or environ.get("GLASSHOUSE_URL")
    if not named and is_stopped(runtime):
        raise APIConnectionError(f"{stopped_text(home)}, or set GLASSHOUSE_URL.")
    found = named or runtime.get("url")
    if not found:
        raise APIConnectionError(
            f"no running service found: {home / 'runtime.json'} does not exist. Start one with "
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
            f"{url!r} is not a valid service address; use a URL like http://127.0.0.1:8420"
        )
    return url.rstrip("/")
