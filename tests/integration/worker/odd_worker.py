"""A real worker, but its ranks may misbehave, and it pauses or dies where a test says.

``$ODD_POINT`` is a file with ``<name> <before|after> <pause|kill>``: where, and what. It is
removed when the worker comes there.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from models import attempts, checkpoints
from models.artifacts import LocalArtifacts
from worker import __main__ as entry
from worker import processes, verdict, workplace
from worker.launch import Launch
from worker.nursery import Nursery
from worker.register import Register
from worker.shipping import Sorter

POINTS: dict[str, tuple[Any, str]] = {
    "assign": (attempts, "assign"),
    "claim": (attempts, "claim"),
    "describe": (workplace, "describe"),
    "prepare": (workplace, "prepare"),
    "fork": (Nursery, "fork"),
    "note": (Register, "note"),
    "run": (attempts, "run"),
    "sort": (Sorter, "sort"),
    "ship": (attempts, "ship"),
    "beat": (attempts, "beat"),
    "put": (LocalArtifacts, "put"),
    "superseded": (checkpoints, "superseded"),
    "judge": (verdict, "judge"),
    "end": (Launch, "end"),
    "finish": (attempts, "finish"),
    "remove": (workplace, "remove"),
}
PAUSE_S = 0.3


def arrive(name: str, when: str) -> None:
    path = Path(os.environ["ODD_POINT"])
    try:
        where, wanted, action = path.read_text().split()
    except (OSError, ValueError):
        return
    if (where, wanted) != (name, when):
        return
    try:
        path.rename(path.with_name("reached"))
    except FileNotFoundError:
        return  # another thread was faster
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(PAUSE_S)


def wrap(name: str, owner: Any, attribute: str) -> None:
    real = getattr(owner, attribute)

    def act(*args: Any, **options: Any) -> Any:
        arrive(name, "before")
        result = real(*args, **options)
        arrive(name, "after")
        return result

    setattr(owner, attribute, act)


def lose_signals() -> None:
    """While a file says so, signals reach no rank: so it is with one that waits in the kernel."""
    flag = Path(os.environ["GLASSHOUSE_HOME"]) / "unkillable"
    real = processes.signal_group

    def signal_group(process: processes.Identity, number: signal.Signals) -> bool:
        return True if flag.exists() else real(process, number)

    processes.signal_group = signal_group


if __name__ == "__main__":
    lose_signals()
    command = (sys.executable, "-P", "-m", "tests.integration.worker.misbehaving")
    Nursery.__init__.__kwdefaults__["command"] = command  # type: ignore[index]
    if os.environ.get("ODD_POINT"):
        for name, (owner, attribute) in POINTS.items():
            wrap(name, owner, attribute)
    sys.exit(entry.main())
