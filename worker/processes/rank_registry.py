"""Keeps the list of running ranks on disk, so that a restarted worker kills those left over.

A rank that cannot be killed stays in the list, and no job gets its devices until it is gone.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import structlog

from glasshouse import processes
from glasshouse.processes import Identity

_log: Any = structlog.get_logger()
_KILL_S = 10.0


class RankRegistry:
    """The list of one worker's ranks, one file for each."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._directory = work / "ranks"
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def note(self, process: Identity, devices: Iterable[str] = ()) -> None:
        """Add a rank with its devices."""
        self._write(process, {"devices": list(devices), "stuck": False})

    def forget(self, process: Identity) -> None:
        """Remove a rank that has ended."""
        self._path(process).unlink(missing_ok=True)

    def give_up(self, process: Identity) -> None:
        """Mark a rank that SIGKILL has not ended."""
        _log.error("rank_unkillable", pid=process.pid)
        for found, entry in self._entries():
            if found == process:
                self._write(process, entry | {"stuck": True})

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
        for process, _ in list(self._entries()):
            killed += processes.signal_group(process, processes.KILL)
            if processes.wait_gone(process, _KILL_S):
                processes.kill_orphans(process)
                self.forget(process)
            else:
                self.give_up(process)
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

    def _write(self, process: Identity, more: dict[str, Any]) -> None:
        entry = {"pid": process.pid, "started": process.started}
        new = self._path(process).with_suffix(".new")
        new.write_text(json.dumps(entry | more))
        new.replace(self._path(process))

    def _path(self, process: Identity) -> Path:
        return self._directory / str(process.pid)
