"""A fork server whose ranks have the simulated accelerator and its process group.

torch starts threads for the devices that a process has at its first backward pass, so this fork
server makes none, and a rank registers the device. On a GPU, a rank is a new program instead
(`engine/process/fresh_rank.py`), which would take seconds for each rank here.
"""

import importlib
from pathlib import Path
from typing import Any

from engine.process import fork_server, rank

main_of_rank = rank.main


def on_the_device(job_dir: Path, *more: Any) -> int:
    """Run a rank that has the device."""
    importlib.import_module("tests.accelerator.simulated").module.draw_as_host()
    importlib.import_module("tests.accelerator.process_group").register()
    return main_of_rank(job_dir, *more)


if __name__ == "__main__":
    rank.main = on_the_device
    fork_server.load_driver = lambda: 0
    fork_server.warm_up = lambda: None
    fork_server.main()
