"""A real worker, but its ranks may misbehave, and it pauses or dies where a test says.

``point`` in its home is a file with ``<failpoint> <pause|kill|stop>``: where, and what; ``stop`` is
SIGSTOP. It becomes
``reached`` when the worker comes there. While there is a file ``slow``, each shipment takes so many
seconds as it says. Other than by ``FAILPOINTS`` a test can so choose a point
while the worker runs.
"""

import os
import signal
import sys
import time
from pathlib import Path

from glasshouse import failpoints

HOME = Path(os.environ.get("GLASSHOUSE_HOME", "."))
EARLY = (
    *("dispatch.commit", "dispatch.committed", "claim.chosen", "claim.commit", "claim.committed"),
    *("workplace.make", "workplace.made", "rank.fork", "rank.forked", "rank.noted"),
    *("ship.begin", "ship.commit", "ship.committed", "ship.released", "beat.commit"),
)
LATE = (
    *("ship.move", "ship.moved", "artifact.rename", "artifact.renamed", "artifact.stored"),
    *("keep.commit", "artifact.delete", "end.begin", "end.commit", "end.committed"),
    "workplace.remove",
)
PAUSE_S = 0.3
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def arrive(name: str) -> None:
    if name == "ship.commit" and (HOME / "slow").exists():
        time.sleep(float((HOME / "slow").read_text()))
    path = HOME / "point"
    try:
        where, action = path.read_text().split()
    except (OSError, ValueError):
        return
    if where != name:
        return
    try:
        path.rename(path.with_name("reached"))
    except FileNotFoundError:
        return  # another thread was faster
    if action in SIGNALS:
        os.kill(os.getpid(), SIGNALS[action])
    time.sleep(PAUSE_S)


if __name__ == "__main__":
    failpoints.failpoint = arrive  # before anybody takes it
    from glasshouse import processes
    from worker import __main__ as entry
    from worker.processes import fork_server
    from worker.processes.fork_server import ForkServerClient

    fork_server.PASSED = (
        *fork_server.PASSED,
        "LD_PRELOAD",
        "CLOCK_SHIFT",
    )  # ranks have the same clock
    real = processes.signal_group

    def signal_group(process: processes.Identity, number: signal.Signals) -> bool:
        """While a file says so, signals get lost, as with a process that waits in the kernel."""
        return True if (HOME / "unkillable").exists() else real(process, number)

    processes.signal_group = signal_group
    command = (sys.executable, "-P", "-m", "tests.integration.worker.misbehaving")
    ForkServerClient.__init__.__kwdefaults__["command"] = command  # type: ignore[index]
    sys.exit(entry.main())
