"""Watching a job: a live view in a terminal, plain lines in a pipe."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.live import Live

from glasshouse.cli.jobs import diagnosis
from glasshouse.cli.jobs.job_view import JobView
from glasshouse.cli.terminal import exit_codes, output
from glasshouse.client import Job

LINE_EVERY_S = 1.0
REFRESH_EVERY_S = 1.0


@contextmanager
def detaching(job_id: str) -> Generator[None]:
    """Make Ctrl-C detach from the job instead of canceling it."""
    try:
        yield
    except KeyboardInterrupt:
        output.message(f"detached; the job continues: glasshouse watch {job_id}")
        raise typer.Exit(exit_codes.DETACHED) from None


def follow(job: Job, *, to_stderr: bool) -> None:
    """Show a job until it has ended, then read it again."""
    console = Console(stderr=to_stderr, highlight=False)
    view = JobView(job.data)
    if console.is_terminal and not console.is_dumb_terminal:
        with Live(view, console=console, refresh_per_second=8):
            _feed(job, view, lambda _, __: None)
    else:
        _feed(job, view, _Lines(view, console))
        if view.layers:  # a pipe sees no live table, so it gets the last one
            console.print(view.table(), soft_wrap=True)
    diagnosis.print_to(console, job.refresh().data)


def _feed(job: Job, view: JobView, seen: Callable[[str, list[str]], None]) -> None:
    refreshed = 0.0
    with job.stream() as stream:
        for event in stream.records():
            notes = view.see(event)
            if time.monotonic() - refreshed > REFRESH_EVERY_S or event["type"] == "end":
                view.refresh(job.refresh().data)
                refreshed = time.monotonic()
            seen(event["type"], notes)


class _Lines:
    """Prints a line for each note and each new state, and values at most once a second."""

    def __init__(self, view: JobView, console: Console) -> None:
        self._view = view
        self._console = console
        self._printed = 0.0
        self._state: str | None = None
        self._open = False

    def __call__(self, event_type: str, notes: list[str]) -> None:
        has_moved = self._view.state != self._state
        is_due = has_moved or time.monotonic() - self._printed >= LINE_EVERY_S
        if event_type == "metrics":
            self._open = True
        for note in notes:
            self._print(note)
        if self._open and is_due:
            self._print(self._view.line())
            self._printed = time.monotonic()
            self._open = False
        if has_moved:
            self._state = self._view.state
            self._print(f"{self._view.job['id']} {self._state}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)
