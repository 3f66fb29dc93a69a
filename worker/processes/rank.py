"""The supervisor's side of a rank: its lifeline, its signals, how it is stopped, and its list.

The list of running ranks is on disk, so that a restarted worker kills those left over. A rank that
cannot be killed stays in it, and no job gets its devices until it is gone.
"""

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from glasshouse import jsonio, processes
from glasshouse.processes import Identity

_log: Any = structlog.get_logger()
_KILL_S = 10.0
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Exit:
    """How a rank ended. ``lost``: the fork server died too, so how it ended is not known."""

    code: int | None = None
    signal: int | None = None
    lost: bool = False
    peak_bytes: int | None = None
    """The peak memory of the process, bytes."""

    def __str__(self) -> str:
        if self.lost:
            return "it was lost with its fork server"
        if self.signal:
            return f"it was killed by {signal_name(self.signal)}"
        return f"it ended with status {self.code}"


class Rank:
    """One training process, and the pipe whose end means that its supervisor is gone.

    To stop it, it is asked, then gets SIGTERM, then SIGKILL. To ask again can only add force.
    """

    def __init__(self, identity: Identity, lifeline: int) -> None:
        self.identity = identity
        self._lifeline: int | None = lifeline
        self._over = threading.Event()
        self._exit: Exit | None = None
        self._how: str | None = None
        self._asked_at = self._termed_at = self._killed_at = _NEVER

    def wait(self, timeout_s: float) -> Exit | None:
        """Wait for the end and return it; None while the rank is running."""
        self._over.wait(timeout_s)
        return self._exit

    def tell(self, command: dict[str, Any]) -> None:
        """Send a command through the lifeline. A rank that has ended does not receive it."""
        if self._lifeline is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._lifeline, jsonio.dumps(command).encode() + b"\n")

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to the rank's whole process group."""
        return processes.signal_group(self.identity, number)

    def report(self, name: str) -> None:
        """Ask for its stacks, and for the file ``name`` in its directory: what it waits for."""
        processes.kill(self.identity, processes.SHOW_STACKS)
        self.tell({"do": "report", "file": name})

    @property
    def is_signalled(self) -> bool:
        """Whether `ask` or `press` sent a signal, so that a death by signal is expected."""
        return self._termed_at != _NEVER

    def has_survived(self, unkillable_s: float) -> bool:
        """Whether SIGKILL has not ended it for so long: it hangs in a system call."""
        return time.monotonic() > self._killed_at + unkillable_s

    def ask(self, how: str = "cancelled", *, force: bool = False) -> None:
        """Ask the rank to stop at its next step boundary; with ``force``, send SIGTERM at once.

        ``how``: ``cancelled``, or with a checkpoint to resume from as ``paused`` or
        ``interrupted``. The first request starts the grace period.
        """
        self._asked_at = min(self._asked_at, time.monotonic())
        if how != self._how:
            self._how = how
            self.tell({"do": "cancel"} if how == "cancelled" else {"do": "stop", "as": how})
        if force:
            self._terminate()

    def press(self, *, grace_s: float, kill_s: float) -> None:
        """Send the next signal if it is due. Called each time the supervisor checks the rank."""
        now = time.monotonic()
        if now >= self._asked_at + grace_s:
            self._terminate()
        if self._killed_at == _NEVER and now >= self._termed_at + kill_s:
            self._killed_at = now
            self.signal(signal.SIGKILL)

    def _terminate(self) -> None:
        if not self.is_signalled:
            self._termed_at = time.monotonic()
            self.signal(signal.SIGTERM)

    def ended(self, how: Exit) -> None:
        """Store the end; called by the thread that reads from the fork server."""
        self._exit = how
        self._over.set()

    def close(self) -> None:
        """Close the lifeline; a rank that is still running then ends itself."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


class RankRegistry:
    """The list of one worker's ranks, one file for each."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._directory = work / "ranks"
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def note(
        self, process: Identity, devices: Iterable[str] = (), *, is_stuck: bool = False
    ) -> None:
        """Add a rank with its devices; ``is_stuck``: SIGKILL has not ended it."""
        if is_stuck:
            _log.error("rank_unkillable", pid=process.pid)
        entry = {"pid": process.pid, "started": process.started}
        entry |= {"devices": list(devices), "stuck": is_stuck}
        new = self._path(process).with_suffix(".new")
        new.write_text(json.dumps(entry))
        new.replace(self._path(process))

    def forget(self, process: Identity) -> None:
        """Remove a rank that has ended."""
        self._path(process).unlink(missing_ok=True)

    def withheld(self) -> dict[str, str]:
        """Return the devices of ranks that cannot be killed, each with the reason."""
        held: dict[str, str] = {}
        for process, entry in self._entries():
            if not entry.get("stuck"):
                continue
            if not (processes.alive(process) or processes.session_of(process)):
                _log.info("rank_gone_at_last", pid=process.pid)
                self.forget(process)
                continue
            reason = f"process {process.pid}, which cannot be killed, still has it"
            held |= dict.fromkeys(entry["devices"], reason)
        return held

    def clear(self) -> int:
        """Kill ranks of earlier processes, remove job directories; return how many were killed."""
        killed = 0
        for process, entry in list(self._entries()):
            killed += processes.signal_group(process, processes.KILL)
            if processes.wait_gone(process, _KILL_S):
                processes.kill_orphans(process)
                self.forget(process)
            else:
                self.note(process, entry["devices"], is_stuck=True)
        for path in self._work.glob("job_*"):
            shutil.rmtree(path, ignore_errors=True)
        return killed

    def _entries(self) -> Iterator[tuple[Identity, dict[str, Any]]]:
        """Yield the entries of this boot; delete all others, whose processes cannot be running."""
        for path in sorted(self._directory.iterdir()):
            try:
                entry: dict[str, Any] = json.loads(path.read_text())
                process = Identity(int(entry["pid"]), str(entry["started"]))
            except (OSError, ValueError, KeyError, TypeError):
                entry, process = {}, Identity(0, "")
            if process.is_of_this_boot:
                yield process, entry
            else:
                path.unlink(missing_ok=True)

    def _path(self, process: Identity) -> Path:
        return self._directory / str(process.pid)


def signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGSEGV`` for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
