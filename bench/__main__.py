"""``make bench``: runs every benchmark of docs/reference/measured.md, one after another.

``make bench-gpu`` runs the one that needs an accelerator.

Each benchmark is a process of its own that prints JSON lines. Run it on an otherwise idle machine;
quote ratios and medians, never one absolute time. ``--save NAME`` also writes the lines to
bench/results/.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

BENCHES = (
    "training.step",
    "training.speed",
    "probes.watching",
    "probes.guarding",
    "probes.hindered",
    "service.fork_server",
    "service.submit_to_step",
    "service.submit",
    "service.stream",
    "service.serving",
    "service.serving_changes",
    "service.drift",
    "storage.stats",
    "storage.purge",
    "storage.retention",
    "service.service",
    "storage.checkpoint",
    "storage.checkpoint_default",
    "data.padding",
    "data.streaming",
    "data.prefetch",
    "data.inference",
    "training.compiling",
    "training.recomputing",
    "training.parallel",
    "training.sharing",
)
ON_ACCELERATORS = ("training.accelerator",)
"""Only if they are named: they need an accelerator."""
HELP = "default: all that need no accelerator"
RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, object]:
    """Return a description of this machine."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return {
        "bench": "machine",
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def main() -> int:
    """Run all benchmarks, or those that are named."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*BENCHES, *ON_ACCELERATORS, []], help=HELP)
    parser.add_argument("--save", metavar="NAME", help="also write bench/results/NAME.jsonl")
    given = parser.parse_args()
    lines = [json.dumps(machine())]
    print(lines[0], flush=True)
    failed = 0
    for name in given.names or BENCHES:
        done = subprocess.run(
            [sys.executable, "-m", f"bench.{name}"], stdout=subprocess.PIPE, text=True, check=False
        )
        print(done.stdout, end="", flush=True)
        lines += done.stdout.splitlines()
        failed += done.returncode != 0
    if given.save and len(lines) > 1:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{given.save}.jsonl").write_text("\n".join(lines) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
