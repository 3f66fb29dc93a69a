"""Child processes: started in groups of their own, known by more than their number, stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import glasshouse

ROOT = Path(glasshouse.__file__).resolve().parents[1]
"""Where the service's packages lie. Processes start here, so that a ``models`` folder in the
user's own directory is never taken for ours."""
POLL_S = 0.02


def birth(pid: int) -> str | None:
    """What tells a process from a later one of the same number; None when it does not run."""
    try:
        if sys.platform == "linux":
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            state, *rest = stat.rpartition(")")[2].split()
            if state in ("Z", "X"):  # ended, and only not yet waited for
                return None
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            return f"{boot}:{rest[18]}"
        command = ["/bin/ps", "-o", "lstart=", "-p", str(pid)]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        return shown.stdout.strip() or None
    except (OSError, IndexError):
        return None


@dataclass(frozen=True, slots=True)
class Running:
    """A process as it is written down for the next life of the stack."""

    name: str
    pid: int
    birth: str

    @classmethod
    def of(cls, name: str, pid: int) -> "Running":
        """Note a process that runs now."""
        return cls(name, pid, birth(pid) or "")

    @classmethod
    def read(cls, value: dict[str, Any]) -> "Running":
        """Read what `as_dict` wrote."""
        return cls(str(value["name"]), int(value["pid"]), str(value["birth"]))

    def as_dict(self) -> dict[str, Any]:
        """Its JSON form."""
        return {"name": self.name, "pid": self.pid, "birth": self.birth}

    def lives(self) -> bool:
        """Whether this very process still runs."""
        return bool(self.birth) and birth(self.pid) == self.birth

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it is still the same process."""
        if self.lives():
            os.kill(self.pid, number)

    def send_group(self, number: signal.Signals) -> None:
        """Signal its process group, if it still leads it."""
        if self.lives():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; whether it has."""
        deadline = time.monotonic() + timeout_s
        while self.lives():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def end(self, timeout_s: float) -> None:
        """Ask its group to end, and after a while end it."""
        self.send_group(signal.SIGTERM)
        if not self.wait(timeout_s):
            self.send_group(signal.SIGKILL)
            self.wait(5)


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
        """How long it may take to end before it is killed."""
        self.failures = 0
        self.started_at = 0.0
        self._environ = dict(environ)
        self._inherited = tuple(inherited)
        self._process: subprocess.Popen[bytes] | None = None
        self.running: Running | None = None

    def with_environ(self, more: Mapping[str, str]) -> Self:
        """Give it more environment variables, before it is started."""
        self._environ |= more
        return self

    def start(self) -> None:
        """Start it in a session of its own; what it prints goes to its log."""
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
        self.running = Running.of(self.name, self._process.pid)

    def ended(self) -> int | None:
        """Its exit status once it has ended."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """Ask it to end, wait, and kill its whole group if it does not."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self.grace_s)
        with suppress(ProcessLookupError, PermissionError):  # what it left behind in its group
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def last_words(self, lines: int = 15) -> str:
        """The end of its log."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])
