"""Callbacks with the method names of Keras and PaddlePaddle, called for the events of a job."""

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple, cast

from glasshouse.client.monitoring.events import AnyEvent
from glasshouse.events import EndEvent, MetricsEvent, StateEvent, is_upkeep

Logs = dict[str, float]
Answer = str | Mapping[str, Any] | None
"""The return value of a callback: see `Callback`."""
VERBS = ("stop", "cancel", "pause", "checkpoint", "evaluate")
_VALIDATION = "validation/"


class Callback:
    """Base class for callbacks. Any object with some of these methods works as a callback.

    With `AsyncClient`, methods may be coroutines. The return value is applied to the job:
    ``"stop"`` (end early as a success, see `Job.stop`), ``"cancel"``, ``"pause"``,
    ``"checkpoint"``, ``"evaluate"``, or ``{"set": {"optimizer.lr": 0.001}}`` (see `Job.set`).
    None does nothing.

    A job that resumes from a checkpoint repeats the steps after it, and so do the calls.
    """

    def on_train_begin(self, logs: Logs) -> Any:
        """Called when the job starts to run. ``logs`` is empty, as in Keras."""

    def on_epoch_begin(self, epoch: int, logs: Logs) -> Any:
        """Called after the first step of an epoch. Epochs count from 0; ``logs`` is empty."""

    def on_train_batch_end(self, step: int, logs: Logs) -> Any:
        """Called after a step, with its loss, metrics and learning rate. Steps count from 0."""

    def on_eval_end(self, logs: Logs) -> Any:
        """Called after an evaluation, with the loss and metrics of the validation data."""

    def on_test_end(self, logs: Logs) -> Any:
        """Keras's name for `on_eval_end`."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> Any:
        """Called after an epoch, with the newest metrics, including ``validation/…``."""

    def on_train_end(self, logs: Logs) -> Any:
        """Called when the job has ended in any state, with the newest metrics."""

    def on_event(self, event: AnyEvent) -> Any:
        """Called for every event, before the other methods."""


NAMES = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Call(NamedTuple):
    """A callback method to call, with its arguments."""

    name: str
    arguments: tuple[Any, ...]


class Action(NamedTuple):
    """An action on the job that a callback returned."""

    verb: str
    settings: dict[str, Any]
    """The settings to change, for the verb ``set``."""


class Dispatcher:
    """Maps events to calls of callback methods, in order."""

    def __init__(self) -> None:
        self._has_begun = False
        self._epoch: int | None = None
        self._logs: Logs = {}

    def calls(self, event: AnyEvent) -> Generator[Call]:
        """The calls for one event."""
        yield Call("on_event", (event,))
        if isinstance(event, StateEvent) and event.to == "running" and not self._has_begun:
            self._has_begun = True
            yield Call("on_train_begin", ({},))
        elif isinstance(event, MetricsEvent):
            yield from self._metrics(event)
        elif isinstance(event, EndEvent):
            yield from self._end_epoch()
            yield Call("on_train_end", (dict(self._logs),))

    def _metrics(self, event: MetricsEvent) -> Generator[Call]:
        values = {name: float(value) for name, value in event.values.items() if not is_upkeep(name)}
        validated = {name: value for name, value in values.items() if name.startswith(_VALIDATION)}
        trained = {name: value for name, value in values.items() if name not in validated}
        if trained:
            yield from self._move_to(event.epoch)
        self._logs |= values
        if trained:
            yield Call("on_train_batch_end", (event.step, trained))
        if validated:
            logs = {name.removeprefix(_VALIDATION): value for name, value in validated.items()}
            yield Call("on_eval_end", (logs,))
            yield Call("on_test_end", (logs,))

    def _move_to(self, epoch: int) -> Generator[Call]:
        if epoch == self._epoch:
            return
        if self._epoch is not None and epoch > self._epoch:
            yield from self._end_epoch()
        self._epoch = epoch
        yield Call("on_epoch_begin", (epoch, {}))

    def _end_epoch(self) -> Generator[Call]:
        if self._epoch is not None:
            yield Call("on_epoch_end", (self._epoch, dict(self._logs)))


def check_callbacks(callbacks: tuple[Any, ...]) -> None:
    """Check the method names of callbacks.

    Raises:
        TypeError: a callback has an unknown ``on_…`` method or no callback method at all.
    """
    if not callbacks:
        raise TypeError("watch() requires at least one callback")
    for callback in callbacks:
        found = {name for name in dir(callback) if name.startswith("on_")}
        unknown = sorted(found - set(NAMES))
        if unknown or not found:
            has = "has no callback method"
            if unknown:
                has = f"has the unknown method {', '.join(unknown)}"
            known = ", ".join(NAMES)
            raise TypeError(f"{type(callback).__name__} {has}; callback methods are: {known}")


def action_of(answer: Any) -> Action | None:
    """Read the return value of a callback.

    Raises:
        TypeError: the value is not a known action.
    """
    if answer is None:
        return None
    if isinstance(answer, str) and answer in VERBS:
        return Action(answer, {})
    if isinstance(answer, Mapping):
        settings = cast("Mapping[str, Any]", answer).get("set")
        if set(cast("Mapping[str, Any]", answer)) == {"set"} and isinstance(settings, Mapping):
            return Action("set", dict(cast("Mapping[str, Any]", settings)))
    wanted = ", ".join(f'"{verb}"' for verb in VERBS)
    raise TypeError(
        f"a callback returned {answer!r}; it must return None, {wanted} or "
        '{"set": {"optimizer.lr": 0.001}}'
    )
