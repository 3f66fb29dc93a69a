"""Child processes of the stack, each in a process group of its own."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import glasshouse
from glasshouse.processes import Identity, identify

ROOT = Path(glasshouse.__file__).resolve().parents[1]
"""The directory of the service's packages. Processes start here, so that they never import a
``models`` folder of the user's own directory."""


class Child:
    """A process that the stack keeps running."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environ: Mapping[str, str],
        inherited: Sequence[int] = (),
        grace_s: float = 10.0,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.log = log
        self.grace_s = grace_s
        """The time that it has to exit before it is killed."""
        self.failures = 0
        self.started_at = 0.0
        self._environ = dict(environ)
        self._inherited = tuple(inherited)
        self._process: subprocess.Popen[bytes] | None = None
        self.running: Identity | None = None

    def with_environ(self, more: Mapping[str, str]) -> Self:
        """Add environment variables. Call it before `start`."""
        self._environ |= more
        return self

    def start(self) -> None:
        """Start it in a session of its own, with its output in its log."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._environ,
                cwd=ROOT,
                pass_fds=self._inherited,
            )
        self.started_at = time.monotonic()
        self.running = identify(self._process.pid)

    def ended(self) -> int | None:
        """Its exit status, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """Send SIGTERM, wait, and kill its process group if it does not exit."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self.grace_s)
        with suppress(ProcessLookupError, PermissionError):  # children that it left behind
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def log_tail(self, lines: int = 15) -> str:
        """The end of its log."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])
