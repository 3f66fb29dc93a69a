"""Commands that run the service: up, down, status, doctor, and its single processes."""

import os
import signal
import subprocess
import sys
import time
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from glasshouse import processes
from glasshouse.cli.service.broker import StackError
from glasshouse.cli.service.doctor import examine
from glasshouse.cli.service.processes import ROOT
from glasshouse.cli.service.stack import Stack, is_locked, make_home, running_stack
from glasshouse.cli.terminal import exit_codes, output
from glasshouse.cli.terminal.output import Json
from glasshouse.client import Client
from glasshouse.client.connection.address import home_dir, is_stopped, read_runtime, stopped_text
from glasshouse.errors import APIConnectionError, APIStatusError

DETACHED_READY_S = 180.0
DOWN_S = 90.0

Home = Annotated[
    Path | None, typer.Option("--home", help="Default: $GLASSHOUSE_HOME, or ~/.glasshouse.")
]


def up(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8420,
    home: Home = None,
    workers: Annotated[int, typer.Option(min=0, help="Number of workers.")] = 1,
    detach: Annotated[bool, typer.Option("--detach", help="Return once the service runs.")] = False,
    open_: Annotated[bool, typer.Option("--open", help="Open the dashboard.")] = False,
    json: Json = False,
) -> None:
    """Run the whole service on this machine: broker, API and workers. Ctrl-C stops it."""
    place = _home(home)
    when_ready = (lambda: _open(place)) if open_ else (lambda: None)
    if detach:
        _up_detached(place, port, workers)
        when_ready()
    else:
        stack = Stack(place, port=port, num_workers=workers, report=output.message)
        stack.run(when_ready)
    if json:
        output.document(_public(read_runtime(place)))


def down(home: Home = None, json: Json = False) -> None:
    """Stop the service started with 'up' and wait until it has stopped."""
    place = _home(home)
    stack = running_stack(place)
    if stack is None and is_locked(place):
        raise StackError("the service is starting or stopping; try again in a moment")
    if stack is not None:
        processes.kill(stack, signal.SIGTERM)
        if not processes.wait_gone(stack, DOWN_S):
            raise StackError(
                f"the service did not stop within {DOWN_S:.0f} s (process {stack.pid})"
            )
    if json:
        output.document({"stopped": stack is not None, "home": str(place)})
    else:
        output.message("stopped" if stack is not None else f"no service is running in {place}")


def status(home: Home = None, json: Json = False) -> None:
    """Show the health of the service and its workers."""
    with Client(*_address(home), timeout=10, max_retries=0) as client:
        ready = _readiness(client)
        workers = [worker.data for worker in client.workers.list()]
    if json:
        output.document({"url": client.url, **ready, "workers": workers})
    else:
        output.line(f"{client.url} is {ready.get('status', 'unknown')}")
        for name, found in ready.get("checks", {}).items():
            output.line(f"  {name}: {found}")
        for name, found in ready.get("warnings", {}).items():
            output.line(f"  {name} (warning): {found}")
        columns = ["id", "state", "host", "version"]
        output.table(columns, ([worker.get(name) for name in columns] for worker in workers))
    if ready.get("status") == "down":
        raise typer.Exit(exit_codes.ERROR)


def doctor(home: Home = None, json: Json = False) -> None:
    """Check the installation and the service for problems, and print how to fix them."""
    checks = examine(_home(home))
    if json:
        output.document([check.as_dict() for check in checks])
    else:
        for check in checks:
            output.line(f"{check.state:<4}  {check.name}: {check.detail}")
            if check.fix:
                output.line(f"      {check.fix}")
    if any(check.state == "fail" for check in checks):
        raise typer.Exit(exit_codes.ERROR)


def open_page(
    home: Home = None,
    print_: Annotated[bool, typer.Option("--print", help="Only print the link.")] = False,
    json: Json = False,
) -> None:
    """Open the dashboard with a link that works once and expires after one minute."""
    with Client(*_address(home)) as client:
        link = client.browser_link()
    if json:
        output.document({"url": link})
    elif print_ or not webbrowser.open(link):
        output.line(link)


def api(context: typer.Context) -> None:
    """Run one API process (python -m api)."""
    _become("api", context.args)


def worker(context: typer.Context) -> None:
    """Run one worker (python -m worker)."""
    _become("worker", context.args)


def migrate(context: typer.Context) -> None:
    """Migrate the database to the newest revision (python -m models.migrate)."""
    _become("models.migrate", context.args)


def _open(home: Path) -> None:
    """Open the dashboard of a service that has just started, or print the link."""
    runtime = read_runtime(home)
    with Client(runtime["url"], runtime["api_key"]) as client:
        link = client.browser_link()
    if not webbrowser.open(link):
        output.message(f"  in a browser       {link}  (works once, for one minute)")


def _address(home: Path | None) -> tuple[str | None, str | None]:
    """Address and key of the service of a home; without a home, the client finds them."""
    if home is None:
        return None, None
    runtime = read_runtime(_home(home))
    if not runtime.get("url"):
        raise StackError(f"no service has been started in {_home(home)} yet")
    if is_stopped(runtime):
        raise APIConnectionError(stopped_text(_home(home)))
    return runtime["url"], runtime.get("api_key")


def _home(given: Path | None) -> Path:
    return home_dir() if given is None else given.expanduser().absolute()


def _public(runtime: dict[str, Any]) -> dict[str, Any]:
    """The runtime file without the key, which must not be printed."""
    return {name: value for name, value in runtime.items() if name != "api_key"}


def _readiness(client: Client) -> dict[str, Any]:
    try:
        return client.ready()
    except APIStatusError as error:
        if error.status_code == 503:
            return error.problem
        raise


def _become(module: str, arguments: list[str]) -> None:
    for name in ("GLASSHOUSE_HOME", "GLASSHOUSE_ARTIFACTS_DIR", "GLASSHOUSE_WORK_DIR"):
        if value := os.environ.get(name):  # it may be relative to the user's directory
            os.environ[name] = str(Path(value).expanduser().absolute())
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606


def _up_detached(home: Path, port: int, workers: int) -> None:
    if is_locked(home):
        url = read_runtime(home).get("url")
        where = f" at {url}" if url else ""
        raise StackError(f"the service is already running{where} (home {home})")
    make_home(home)
    log = home / "logs" / "stack.log"
    command = [sys.executable, "-m", "glasshouse.cli", "up", "--home", str(home)]
    command += ["--port", str(port), "--workers", str(workers)]
    with log.open("wb") as file:
        process = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ROOT,
        )
    deadline = time.monotonic() + DETACHED_READY_S
    # the banner is the last thing that a start prints
    while "/docs" not in log.read_text(encoding="utf-8", errors="replace"):
        if process.poll() is not None:
            raise StackError(f"the service did not start:\n{log.read_text(errors='replace')}")
        if time.monotonic() > deadline:
            process.terminate()
            raise APIConnectionError(
                f"the service is not ready after {DETACHED_READY_S:.0f} s; see {log}"
            )
        time.sleep(0.05)
    output.message(log.read_text(encoding="utf-8", errors="replace").rstrip())
    process.returncode = 0  # it continues to run; do not wait for it
