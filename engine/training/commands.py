"""Commands to a job while it trains: change settings, evaluate or save, at step boundaries.

A boundary has the number of the next step. A command that was applied before a restart is applied
again at its own boundary, so that repeated steps are the same.
"""

import contextlib
import traceback
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from engine.core.problems import SpecProblems
from engine.core.spool import Emit, now
from engine.learner.learner import Learner
from engine.optim.dense_and_sparse import half_of
from engine.optim.parameter_options import set_arguments
from engine.training.settable import changed_job, optimizer_changes, optimizer_values, pointer_of
from glasshouse.errors import FieldProblem
from glasshouse.spec import TrainJob
from glasshouse.spec.live import is_of_optimizer, is_of_sparse, place, value_of

Order = dict[str, Any]
"""``id``, ``by``, ``set`` or ``do``; for one to be applied again also ``step``, ``old``,
``new``."""
Follow = Callable[[TrainJob, int], None]
"""Takes a job with changed settings and the updates done; raises SpecProblems to refuse it."""


class Commands:
    """Carries out commands; the loop calls it at a boundary whenever there are some."""

    def __init__(
        self,
        job: TrainJob,
        learner: Learner,
        orders: deque[Order],
        *,
        first: int,
        follow: Follow,
        emit: Emit,
    ) -> None:
        self._job = job
        self._learner = learner
        self._orders = orders
        self._first = first
        self._follow = follow
        self._emit = emit

    def at(self, step: int) -> set[str]:
        """Carry out the commands due before a step; return what else to do: evaluate, checkpoint.

        Commands apply in the order of their requests: a new one waits for all that are to be
        applied again. An evaluation or a checkpoint needs a step before it.
        """
        to_do: set[str] = set()
        while self._orders:
            order = self._orders[0]
            is_new, is_first = "step" not in order, step == self._first
            if (is_new and is_first and "do" in order) or order.get("step", step) > step:
                break
            self._orders.popleft()
            if "set" in order:
                self._set(order, step)
            else:
                self._say(order, "applied", step)
                to_do |= set() if is_first else {order["do"]}  # the checkpoint already includes it
        return to_do

    def _set(self, order: Order, step: int) -> None:
        changes: dict[str, Any] = order["set"]
        try:
            changed = changed_job(self._job, changes)
            old = {path: self._value(path) for path in changes}
            with self._undone_on_error():
                self._apply(changed, changes)
                self._follow(changed, step)  # last, because it checks before it assigns
        except SpecProblems as error:
            self._say(order, "rejected", step, problem=error.problems[0].as_dict())
            return
        except Exception as error:  # a command must not end the job
            traceback.print_exc()
            self._say(order, "rejected", step, problem=_unexpected(error, changes).as_dict())
            return
        self._job = changed
        new = {path: self._value(path) for path in changes}
        values = order if "step" in order else {"old": old, "new": new}
        self._say(order, "applied", step, old=values["old"], new=values["new"])

    def _apply(self, changed: TrainJob, changes: dict[str, Any]) -> None:
        for which, names in optimizer_changes(changes).items():
            values = optimizer_values(changed.optimizer, names, which)
            half = half_of(self._learner.optimizer, which)
            if self._learner.rate is not None and "lr" in values:
                self._learner.rate.rebase(values.pop("lr"), half)
            set_arguments(half, values)
        if self._learner.clip is not None and changed.grad_clip is not None:
            self._learner.clip.spec = changed.grad_clip

    @contextlib.contextmanager
    def _undone_on_error(self) -> Generator[None]:
        """Restore the optimizer, schedule and clipping if this context raises."""
        rate, clip, groups = (
            self._learner.rate,
            self._learner.clip,
            self._learner.optimizer.param_groups,
        )
        before = [dict(group) for group in groups]
        ends = None if clip is None else clip.spec
        try:
            with contextlib.nullcontext() if rate is None else rate.undone_on_error():
                yield
        except BaseException:
            for group, was in zip(groups, before, strict=True):
                group.clear()
                group.update(was)
            if clip is not None:
                clip.spec = ends
            raise

    def _value(self, path: str) -> Any:
        if is_of_optimizer(path):
            name = place(path)[-1]
            half = half_of(self._learner.optimizer, "sparse" if is_of_sparse(path) else "dense")
            if name == "lr" and self._learner.rate is not None:
                return self._learner.rate.base(half)
            return half.param_groups[0][name]
        return value_of(self._job.model_dump(mode="json"), path)

    def _say(self, order: Order, state: str, step: int, **more: Any) -> None:
        asked = {name: order[name] for name in ("set", "do") if name in order}
        record = {"type": "command", "at": now(), "command": order["id"], "state": state}
        record |= {"step": step, **asked, "old": None, "new": None, "problem": None}
        self._emit(record | more | {"by": order.get("by")})


def _unexpected(error: Exception, changes: dict[str, Any]) -> FieldProblem:
    pointer = pointer_of(next(iter(changes))) if len(changes) == 1 else "/set"
    why = f"{type(error).__name__}: {error}"[:300]
    detail = f"the change could not be applied, and nothing was changed ({why})"
    return FieldProblem(pointer, detail, "not_applied")
