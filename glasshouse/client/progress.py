"""A progress bar on standard error, drawn only where somebody can see it."""

from types import TracebackType
from typing import Any, Self


class Bar:
    """Shows how far a job is. Draws nothing when it is not wanted or no terminal is there."""

    def __init__(self, title: str, *, shown: bool) -> None:
        self._title = title
        self._progress: Any = None
        self._shown = shown

    def __enter__(self) -> Self:
        if not self._shown:
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

    def show(self, state: str, progress: dict[str, Any], summary: dict[str, Any]) -> None:
        """Draw the newest figures."""
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
