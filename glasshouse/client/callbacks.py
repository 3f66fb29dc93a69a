"""Callbacks with the names that Keras and PaddlePaddle have, called by the events of a job."""

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple, cast

from glasshouse.client.events import AnyEvent
from glasshouse.events import EndEvent, MetricsEvent, StateEvent, is_upkeep

Logs = dict[str, float]
Answer = str | Mapping[str, Any] | None
"""What a callback asks for: see `Callback`."""
VERBS = ("stop", "cancel", "pause", "checkpoint", "evaluate")
_VALIDATION = "validation/"


class Callback:
    """What is called while a job trains; any object with some of these methods will do.

    A method may be a coroutine where the client is awaited. What it returns is done to the job:
    ``"stop"`` (end well, see `Job.stop`), ``"cancel"``, ``"pause"``, ``"checkpoint"``,
    ``"evaluate"``, or ``{"set": {"optimizer.lr": 0.001}}`` (see `Job.set`). None does nothing.

    A job that goes on from a checkpoint after a loss runs some steps once more, and is seen to.
    """

    def on_train_begin(self, logs: Logs) -> Any:
        """The job has begun to run; logs is empty, as in Keras."""

    def on_epoch_begin(self, epoch: int, logs: Logs) -> Any:
        """The first step of an epoch has been done; epochs count from 0."""

    def on_train_batch_end(self, step: int, logs: Logs) -> Any:
        """A step has been done: its loss, metrics and learning rate. Steps count from 0."""

    def on_eval_end(self, logs: Logs) -> Any:
        """The validation rows have been run: their loss and metrics."""

    def on_test_end(self, logs: Logs) -> Any:
        """The same by Keras's name."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> Any:
        """An epoch is over: the newest figures, those of validation as ``validation/…``."""

    def on_train_end(self, logs: Logs) -> Any:
        """The job has ended, well or not: the newest figures."""

    def on_event(self, event: AnyEvent) -> Any:
        """Every event, before what else it is reason to call."""


NAMES = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Call(NamedTuple):
    """A method to be called."""

    name: str
    arguments: tuple[Any, ...]


class Wish(NamedTuple):
    """What a callback wants to be done."""

    verb: str
    settings: dict[str, Any]
    """Of ``set``."""


class Director:
    """Tells of each event what is to be called, in order."""

    def __init__(self) -> None:
        self._has_begun = False
        self._epoch: int | None = None
        self._logs: Logs = {}

    def calls(self, event: AnyEvent) -> Generator[Call]:
        """The calls of one event."""
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
        judged = {name: value for name, value in values.items() if name.startswith(_VALIDATION)}
        trained = {name: value for name, value in values.items() if name not in judged}
        if trained:
            yield from self._move_to(event.epoch)
        self._logs |= values
        if trained:
            yield Call("on_train_batch_end", (event.step, trained))
        if judged:
            logs = {name.removeprefix(_VALIDATION): value for name, value in judged.items()}
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
    """Find methods that would never be called.

    Raises:
        TypeError: there is one, or there is none that would be.
    """
    if not callbacks:
        raise TypeError("watch() wants at least one callback")
    for callback in callbacks:
        found = {name for name in dir(callback) if name.startswith("on_")}
        unknown = sorted(found - set(NAMES))
        if unknown or not found:
            has = f"has {', '.join(unknown)}" if unknown else "has no method of a callback"
            known = ", ".join(NAMES)
            raise TypeError(f"{type(callback).__name__} {has}; what is called: {known}")


def wish_of(answer: Any) -> Wish | None:
    """What a callback's answer asks for.

    Raises:
        TypeError: it asks for nothing that can be done.
    """
    if answer is None:
        return None
    if isinstance(answer, str) and answer in VERBS:
        return Wish(answer, {})
    if isinstance(answer, Mapping):
        settings = cast("Mapping[str, Any]", answer).get("set")
        if set(cast("Mapping[str, Any]", answer)) == {"set"} and isinstance(settings, Mapping):
            return Wish("set", dict(cast("Mapping[str, Any]", settings)))
    wanted = ", ".join(f'"{verb}"' for verb in VERBS)
    raise TypeError(
        f"a callback answered {answer!r}; it may answer None, {wanted} or "
        '{"set": {"optimizer.lr": 0.001}}'
    )
