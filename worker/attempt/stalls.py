"""Finds which process keeps the others waiting when a job has stalled.

Each process is asked for the stacks of its threads and for what it waits for. Its main thread may
hang, so the thread that listens to the lifeline answers: with the stacks from a signal handler,
which needs no interpreter lock, and with the rest if it gets the lock. A stopped process can answer
neither.
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from glasshouse import processes
from glasshouse.processes import Identity
from models.tables import now
from worker.processes.fork_server import rank_directory, stacks_path
from worker.processes.ranks import Ranks

ANSWER_S = 3.0
"""How long the processes have to answer."""
MAX_BYTES = 1 << 20
"""A longer answer of a process is cut (stacks) or not read (collectives)."""
_REPORT = "waits.json"
_POLL_S = 0.02
_SHOWN = 8
_ALL = "default_pg"
_JSON = "application/json"

State = Literal["stopped", "silent", "running", "waiting"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a process."""

    number: int
    """The same in all processes, from 1."""
    operation: str

    def __str__(self) -> str:
        return f"{self.operation} {self.number}"


@dataclass(frozen=True, slots=True)
class RankState:
    """What one process was doing when the job had stalled."""

    rank: int
    state: State
    """``stopped`` by a signal; ``silent``: it did not answer; ``waiting`` for others."""
    newest: Collective | None = None
    """The newest collective that it has entered."""
    waits_in: Collective | None = None
    """The oldest collective that it has entered and not left."""
    receives_from: int | None = None
    between_passes: bool = False
    """Whether it waits for another stage of a pipeline."""
    joining: bool = False
    joined: bool = False

    @staticmethod
    def of(rank: int, answer: Mapping[str, Any]) -> "RankState":
        """Read what a process answered."""
        recorded = [
            one
            for kind in ("collectives", "nccl")
            for one in answer.get(kind, {}).get("entries", ())
            if not one["is_p2p"]
        ]
        entries = [  # each group of processes has its own numbers: compare those of all processes
            (Collective(int(one["collective_seq_id"]), _operation(one)), bool(one["retired"]))
            for one in recorded
            if one["process_group"][1] == _ALL
        ]
        waits = [one for one, is_over in entries if not is_over]
        is_waiting = any(not one["retired"] for one in recorded)
        sender, joining = answer["receives_from"], bool(answer["joining"])
        is_waiting = is_waiting or joining or sender is not None or bool(answer["between_passes"])
        return RankState(
            rank,
            "waiting" if is_waiting else "running",
            newest=max((one for one, _ in entries), key=_number, default=None),
            waits_in=min(waits, key=_number, default=None),
            receives_from=sender,
            between_passes=bool(answer["between_passes"]),
            joining=joining,
            joined=bool(answer["joined"]),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return what the event ``stalled`` says of it."""
        waits = None if self.waits_in is None else str(self.waits_in)
        if self.joining:
            waits = "joining the group"
        elif self.receives_from is not None:
            waits = f"receiving from rank {self.receives_from}"
        elif self.between_passes:
            waits = "receiving from another stage"
        return {"rank": self.rank, "state": self.state, "waits_in": waits}


@dataclass(frozen=True, slots=True)
class Stall:
    """What was found out about a job that has stalled."""

    ranks: Sequence[RankState] = ()
    """All processes that were running."""
    cause: int | None = None
    """The process that keeps the others waiting, if it is known."""
    reason: str | None = None
    """What it does or has not done."""
    artifacts: Sequence[dict[str, Any]] = field(default_factory=tuple[dict[str, Any], ...])
    """Records of the files with stacks and collectives."""

    @property
    def is_hopeless(self) -> bool:
        """Whether the cause is stopped, so that no process can reach its next step boundary."""
        return any(one.rank == self.cause and one.state == "stopped" for one in self.ranks)


def investigate(ranks: Ranks, directory: Path, meanwhile: Callable[[], None]) -> Stall:
    """Ask the running processes and store what they answer; takes at most `ANSWER_S`.

    ``directory``: that of the attempt. ``meanwhile`` is called repeatedly.
    """
    running = {n: one for n, one in ranks.running().items() if processes.alive(one)}
    statuses = {number: _status(identity) for number, identity in running.items()}
    asked = {number for number, status in statuses.items() if status != psutil.STATUS_STOPPED}
    for number in running:
        for path in _answers(directory, number):
            _empty(path)
    for number in asked:
        ranks.report(number, _REPORT)
    deadline = time.monotonic() + ANSWER_S
    before: list[int] = []
    while time.monotonic() < deadline:
        sizes = [_size(path) for number in sorted(asked) for path in _answers(directory, number)]
        if all(sizes) and sizes == before:  # whole: no longer growing
            break
        before = sizes
        meanwhile()
        time.sleep(_POLL_S)
    states = [
        _state(directory, number, is_stopped=number not in asked) for number in sorted(running)
    ]
    cause, reason = find_cause(states)
    if cause is None:
        slept = [number for number in asked if statuses[number] == psutil.STATUS_DISK_SLEEP]
        if len(slept) == 1:
            cause, reason = slept[0], f"rank {slept[0]} hangs in a system call"
    stored = [one for number in sorted(running) for one in _stored(directory, number)]
    return Stall(states, cause, reason, stored)


def find_cause(ranks: Sequence[RankState]) -> tuple[int | None, str | None]:
    """Return the process that keeps the others waiting, and why; None if that is not known."""
    by_state = {state: [one for one in ranks if one.state == state] for state in _STATES}
    if stopped := by_state["stopped"]:
        return stopped[0].rank, f"{_who(stopped, 'was', 'were')} stopped by a signal"
    waiting = by_state["waiting"]
    if not waiting:
        return None, None
    if silent := by_state["silent"]:
        return silent[0].rank, f"{_who(silent, 'does', 'do')} not answer"
    found = _not_joined(ranks) or _not_sent(ranks) or _not_passed(ranks) or _not_entered(ranks)
    return found or (None, None)


_STATES: tuple[State, ...] = ("stopped", "silent", "running", "waiting")


def _not_joined(ranks: Sequence[RankState]) -> tuple[int, str] | None:
    joining = [one for one in ranks if one.joining]
    absent = [one for one in ranks if not (one.joining or one.joined)]
    if not (joining and absent):
        return None
    who, for_whom = _who(absent, "has", "have"), _who(joining, "waits", "wait")
    return absent[0].rank, f"{who} not joined the group, for which {for_whom}"


def _not_sent(ranks: Sequence[RankState]) -> tuple[int, str] | None:
    by_rank = {one.rank: one for one in ranks}
    for one in ranks:
        sender = None if one.receives_from is None else by_rank.get(one.receives_from)
        if sender is not None and sender.state == "running":
            return sender.rank, f"rank {one.rank} waits for a message of rank {sender.rank}"
    return None


def _not_passed(ranks: Sequence[RankState]) -> tuple[int, str] | None:
    """Return the processes of a pipeline that compute while others wait for their values."""
    waiting = [one for one in ranks if one.between_passes]
    running = [one for one in ranks if one.state == "running"]
    if not (waiting and running):
        return None
    who, others = _who(running, "has", "have"), _who(waiting, "waits", "wait")
    return running[0].rank, f"{who} not ended the pass of a stage, for which {others}"


def _not_entered(ranks: Sequence[RankState]) -> tuple[int, str] | None:
    """Return the processes that have not entered the collective that others wait in."""
    waiting = [one for one in ranks if one.waits_in is not None]
    if not waiting:
        return None
    last = max((one.waits_in for one in waiting if one.waits_in), key=_number)
    there = [one for one in waiting if one.waits_in == last]
    late = [one for one in ranks if one not in there and _reached(one) < last.number]
    if not late:
        return None
    who, others = _who(late, "has", "have"), _who(there, "waits", "wait")
    return late[0].rank, f"{who} not entered {last}, in which {others}"


def _reached(one: RankState) -> int:
    return 0 if one.newest is None else one.newest.number


def _who(ranks: Sequence[RankState], one: str, many: str) -> str:
    """Return ``rank 1 has`` or ``ranks 1, 2 have``; of many, the first ones."""
    shown = ", ".join(str(each.rank) for each in ranks[:_SHOWN])
    shown += " …" if len(ranks) > _SHOWN else ""
    return f"rank {shown} {one}" if len(ranks) == 1 else f"ranks {shown} {many}"


def _number(one: Collective) -> int:
    return one.number


def _operation(entry: Mapping[str, Any]) -> str:
    return str(entry["profiling_name"]).rpartition(":")[2][:40]


def _status(identity: Identity) -> str:
    try:
        return psutil.Process(identity.pid).status()
    except psutil.Error:
        return psutil.STATUS_DEAD


def _answers(directory: Path, rank: int) -> tuple[Path, Path]:
    return stacks_path(directory, rank), rank_directory(directory, rank) / _REPORT


def _empty(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("r+b") as file:
        file.truncate()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _state(directory: Path, rank: int, *, is_stopped: bool) -> RankState:
    if is_stopped:
        return RankState(rank, "stopped")
    try:
        answer: Any = json.loads(_start_of(_answers(directory, rank)[1]))
        return RankState.of(rank, answer)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return RankState(rank, "silent")


def _start_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES)


def _stored(directory: Path, rank: int) -> list[dict[str, Any]]:
    """Store what a process answered; return the records of the files."""
    found: list[dict[str, Any]] = []
    names = (f"stacks-rank-{rank}.txt", "text/plain"), (f"collectives-rank-{rank}.json", _JSON)
    for path, (name, media_type) in zip(_answers(directory, rank), names, strict=True):
        with contextlib.suppress(OSError):
            if data := _start_of(path):
                (directory / "artifacts" / name).write_bytes(data)
                record = {"type": "artifact", "at": now().isoformat(), "name": name}
                record |= {"media_type": media_type, "size_bytes": len(data)}
                found.append(record | {"file": f"artifacts/{name}"})
    return found
