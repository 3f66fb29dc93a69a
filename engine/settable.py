"""Which settings of a training job can be changed while it runs, and whether a change is one.

A setting of the optimizer is a number among the arguments of its class that its parameter groups
keep; what it may be, torch's own constructor decides. Knows torch; knows nothing of steps.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic
import torch
from torch import nn

from engine.learning_rate import cycled
from engine.optim import build_optimizer
from engine.problems import SpecProblems, one
from glasshouse.spec import Optimizer, TrainJob
from glasshouse.spec.live import is_of_optimizer, is_of_sparse, overlay, place
from glasshouse.spec.wording import said

_OPTIMIZER = "optimizer."
_PREFIXES = {"dense": _OPTIMIZER, "sparse": f"{_OPTIMIZER}sparse."}
_AT_START = {("Adagrad", "initial_accumulator_value"), ("Rprop", "lr")}
"""Arguments that an optimizer reads at its first step and never again."""
_ONE_OF = (
    ("stop", ("epochs", "steps", "seconds")),
    ("evaluate", ("every_epochs", "every_steps")),
)
_SAVING = ("every_epochs", "every_steps")


def settable(job: TrainJob) -> list[str]:
    """The paths of the settings that can be changed, in the spec's order."""
    spec = job.model_dump(mode="json")
    taken = cycled(job.scheduler)
    names = [name for name in optimizer_settings(job.optimizer) if name not in taken]
    found = [_OPTIMIZER + name for name in names]
    if job.optimizer.sparse is not None:
        names = [name for name in optimizer_settings(job.optimizer.of_sparse) if name not in taken]
        found += [f"{_OPTIMIZER}sparse.{name}" for name in names]
    if job.grad_clip is not None:
        found += ["grad_clip.max"] + ["grad_clip.min"] * (job.grad_clip.min is not None)
    for part, fields in _ONE_OF:
        found += [f"{part}.{name}" for name in fields if (spec[part] or {}).get(name) is not None]
    early = job.stop.early
    found += [] if early is None else ["stop.early.patience", "stop.early.min_delta"]
    saving = spec["checkpoint"]
    used = [name for name in _SAVING if saving[name] is not None]
    found += [f"checkpoint.{name}" for name in used or _SAVING]
    return found + (["checkpoint.every_s"] if "every_s" in saving else [])


def optimizer_settings(optimizer: Optimizer) -> list[str]:
    """The arguments of an optimizer that can be changed between two steps."""
    group = _tiny(optimizer).param_groups[0]
    names = (name for name, value in group.items() if name != "params" and _is_number(value))
    return [name for name in names if (optimizer.type, name) not in _AT_START]


def changed_job(job: TrainJob, changes: Mapping[str, Any]) -> TrainJob:
    """The job with some settings changed.

    Raises:
        SpecProblems: one cannot be changed, or not to this value; points into ``/set``.
    """
    if not changes:
        raise one("/set", "name at least one setting and its new value", "missing")
    known = settable(job)
    for path in changes:
        if path not in known:
            raise one(_pointer(path), _why_not(path, known), "not_settable")
    try:
        text = json.dumps(overlay(job.model_dump(mode="json"), changes))
        changed = TrainJob.model_validate_json(text)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise one(_blamed(first["loc"], changes), said(first, TrainJob), first["type"]) from None
    for which, names in optimizer_changes(changes).items():
        before, after = (_half(item.optimizer, which) for item in (job, changed))
        _try_optimizer(before, after, names, _PREFIXES[which])
    return changed


def optimizer_changes(changes: Mapping[str, Any]) -> dict[str, list[str]]:
    """The arguments that are to change, of the ``dense`` optimizer and of the ``sparse`` one."""
    found: dict[str, list[str]] = {}
    for path in filter(is_of_optimizer, changes):
        found.setdefault("sparse" if is_of_sparse(path) else "dense", []).append(place(path)[-1])
    return found


def _half(optimizer: Optimizer, which: str) -> Optimizer:
    return optimizer.of_sparse if which == "sparse" else optimizer


def optimizer_values(
    optimizer: Optimizer, names: Sequence[str], which: str = "dense"
) -> dict[str, Any]:
    """What some arguments become in the parameter groups of an optimizer, as torch keeps them."""
    group = _tiny(_half(optimizer, which)).param_groups[0]
    return {name: group[name] for name in names}


def _try_optimizer(before: Optimizer, after: Optimizer, names: Sequence[str], prefix: str) -> None:
    """Have torch check the values, and a tiny optimizer go on with them."""
    try:
        values = optimizer_values(after, names)
    except SpecProblems as error:
        item = error.problems[0]
        name = item.pointer.rpartition("/")[2]
        pointer = _pointer(prefix + (name if name in names else names[0]))
        raise one(pointer, item.detail, item.code) from None
    tiny = _tiny(before)
    _step(tiny, before)
    tiny.param_groups[0].update(values)
    try:
        _step(tiny, before)
    except Exception as cause:
        why = f"{type(cause).__name__}: {cause}"[:200]
        detail = f"{before.type} cannot go on with this value (torch: {why}); it keeps nothing for "
        detail += f"{', '.join(names)} unless it started so: fork the job with it"
        raise one(_pointer(prefix + names[0]), detail, "not_settable") from cause


def _tiny(optimizer: Optimizer) -> torch.optim.Optimizer:
    return build_optimizer(optimizer, [nn.Parameter(torch.ones(4, 4))])


def _step(tiny: torch.optim.Optimizer, optimizer: Optimizer) -> None:
    grad = torch.ones(4, 4)
    tiny.param_groups[0]["params"][0].grad = (
        grad.to_sparse(1) if optimizer.type == "SparseAdam" else grad
    )
    tiny.step()


def _is_number(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(part is None or _is_number(part) for part in value)  # pyright: ignore[reportUnknownVariableType]
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _why_not(path: str, known: Sequence[str]) -> str:
    listed = ", ".join(known)
    if path.startswith("probes"):
        return "a probe is changed by PATCH /jobs/{id}/probes/{prb}; here can be set: " + listed
    return f"{path[:100]!r} cannot be changed while the job runs; what can: {listed}"


def _blamed(location: Sequence[int | str], changes: Mapping[str, Any]) -> str:
    """The change that a place in the spec is due to."""
    for path in changes:
        where = place(path)
        if tuple(location[: len(where)]) == where:
            return _pointer(path)
    return _pointer(next(iter(changes)))


def _pointer(path: str) -> str:
    escaped = path.replace("~", "~0").replace("/", "~1")
    return f"/set/{escaped}"
