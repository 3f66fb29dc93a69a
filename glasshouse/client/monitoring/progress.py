"""Progress display: a bar on standard error, or a card in a notebook."""

import sys
from types import TracebackType
from typing import Any, Self

from glasshouse.client.monitoring.job_card import Card


class Bar:
    """A progress display. Draws nothing if ``shown`` is false."""

    def __init__(self, title: str, *, shown: bool) -> None:
        self._title = title
        self._progress: Any = None
        self._shown = shown
        self._display = notebook_display() if shown else None
        self._handle: Any = None

    @property
    def is_notebook(self) -> bool:
        """Whether it shows cards in a notebook."""
        return self._display is not None

    def __enter__(self) -> Self:
        if not self._shown or self.is_notebook:
            return self
        from rich.console import Console  # noqa: PLC0415 - rich only where it is used
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._progress.start()
        self._task = self._progress.add_task(self._title, total=None, figures="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show_card(self, card: Card) -> None:
        """Show a card in place of the previous one."""
        if self._handle is not None:
            self._handle.update(card)
        elif self._display is not None:
            self._handle = self._display(card, display_id=True)

    def show(self, state: str, progress: dict[str, Any], summary: dict[str, Any]) -> None:
        """Update the progress bar."""
        if self._progress is None:
            return
        figures = state
        loss = summary.get("loss", {}).get("last")
        if loss is not None:
            figures += f"  loss {loss:.4g}"
        done = progress.get("step", 0)
        total = progress.get("num_steps")
        if state == "succeeded":
            done, total = total or done or 1, total or done or 1
        self._progress.update(self._task, completed=done, total=total, figures=figures)


def notebook_display() -> Any:
    """IPython's ``display`` in a notebook; otherwise None. Imports nothing."""
    ipython: Any = sys.modules.get("IPython")
    if ipython is None:
        return None
    # IPython in a terminal has no kernel and shows no HTML
    has_kernel = getattr(ipython.get_ipython(), "kernel", None) is not None
    return ipython.display.display if has_kernel else None
