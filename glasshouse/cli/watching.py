"""Following a job: a live picture in a terminal, plain lines in a pipe."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live

from glasshouse.cli.view import JobView
from glasshouse.client import Job

LINE_EVERY_S = 1.0
REFRESH_EVERY_S = 1.0


def follow(job: Job, *, to_stderr: bool) -> None:
    """Show a job until it has ended; the job is read anew at the end."""
    console = Console(stderr=to_stderr, highlight=False)
    view = JobView(job.data)
    if console.is_terminal:
        with Live(get_renderable=view.render, console=console, refresh_per_second=8):
            _feed(job, view, lambda _: None)
    else:
        _feed(job, view, _Lines(view, console))
        if view.layers:  # a pipe sees no live table, so it gets the last one
            console.print(view.table())
    job.refresh()


def _feed(job: Job, view: JobView, seen: Callable[[str], None]) -> None:
    refreshed = 0.0
    with job.stream() as stream:
        for event in stream.records():
            view.see(event)
            if time.monotonic() - refreshed > REFRESH_EVERY_S or event["type"] == "end":
                view.refresh(job.refresh().data)
                refreshed = time.monotonic()
            seen(event["type"])


class _Lines:
    """Prints a line for each turn of events, and figures at most once a second."""

    def __init__(self, view: JobView, console: Console) -> None:
        self._view = view
        self._console = console
        self._printed = 0.0
        self._state: str | None = None
        self._open = False

    def __call__(self, event_type: str) -> None:
        is_due = time.monotonic() - self._printed >= LINE_EVERY_S
        if event_type == "metrics":
            self._open = True
        if event_type == "command":
            self._print(self._view.notes[-1])
        if self._open and (is_due or event_type == "end"):
            self._print(self._view.line())
            self._printed = time.monotonic()
            self._open = False
        if self._view.state != self._state:
            self._state = self._view.state
            self._print(f"{self._view.job['id']} {self._state}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)
