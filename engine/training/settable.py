"""Which settings of a training job can be changed while it runs, and whether a change is valid.

An optimizer setting is a numeric argument of its class that its parameter groups keep. torch's own
constructor checks its values. Knows torch; knows nothing of steps.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic
import torch
from torch import nn

from engine.core.problems import SpecProblems, one
from engine.optim.lr_schedulers import cycled
from engine.optim.optimizers import build_optimizer
from glasshouse.spec import Optimizer, TrainJob
from glasshouse.spec.error_locations import place_of
from glasshouse.spec.error_messages import said
from glasshouse.spec.live import is_of_optimizer, is_of_sparse, overlay, place

_OPTIMIZER = "optimizer."
_PREFIXES = {"dense": _OPTIMIZER, "sparse": f"{_OPTIMIZER}sparse."}
_AT_START = {("Adagrad", "initial_accumulator_value"), ("Rprop", "lr")}
"""Arguments that an optimizer reads only at its first step."""
_HEADROOM = 1e6
"""Factor by which ``lr_scale`` and a schedule may multiply a learning rate without an overflow."""
_LAST_STEP = 1_000_000_000
_ONE_OF = (
    ("stop", ("epochs", "steps", "seconds")),
    ("evaluate", ("every_epochs", "every_steps")),
)
_SAVING = ("every_epochs", "every_steps")


def settable(job: TrainJob) -> list[str]:
    """Return the paths of the settings that can be changed, in the spec's order."""
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
    """Return the arguments of an optimizer that can be changed between two steps."""
    group = _tiny(optimizer).param_groups[0]
    names = (name for name, value in group.items() if name != "params" and _is_number(value))
    return [name for name in names if (optimizer.type, name) not in _AT_START]


def changed_job(job: TrainJob, changes: Mapping[str, Any]) -> TrainJob:
    """Return the job with some settings changed.

    Raises:
        SpecProblems: a setting cannot be changed, or not to this value; points into ``/set``.
    """
    if not changes:
        raise one("/set", "name at least one setting and its new value", "missing")
    known = settable(job)
    for path in changes:
        if path not in known:
            raise one(pointer_of(path), _why_not(path, known), "not_settable")
    body = overlay(job.model_dump(mode="json"), changes)
    try:
        changed = TrainJob.model_validate_json(json.dumps(body))
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = _blamed(place_of(first, body), changes)
        raise one(where, said(first, TrainJob), first["type"]) from None
    for which, names in optimizer_changes(changes).items():
        before, after = (_half(item.optimizer, which) for item in (job, changed))
        _try_optimizer(before, after, _layouts(job, which), names, _PREFIXES[which])
    return changed


def optimizer_changes(changes: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the arguments to change, of the ``dense`` and of the ``sparse`` optimizer."""
    found: dict[str, list[str]] = {}
    for path in filter(is_of_optimizer, changes):
        found.setdefault("sparse" if is_of_sparse(path) else "dense", []).append(place(path)[-1])
    return found


def _half(optimizer: Optimizer, which: str) -> Optimizer:
    return optimizer.of_sparse if which == "sparse" else optimizer


def optimizer_values(
    optimizer: Optimizer, names: Sequence[str], which: str = "dense"
) -> dict[str, Any]:
    """Return the values of arguments in an optimizer's parameter groups, as torch keeps them."""
    group = _tiny(_half(optimizer, which)).param_groups[0]
    return {name: group[name] for name in names}


def _layouts(job: TrainJob, which: str) -> list[str]:
    """Return the layouts of the gradients of an optimizer: ``dense``, ``sparse`` or both."""
    if job.optimizer.sparse is not None:
        return [which]
    if job.optimizer.type == "SparseAdam":
        return ["sparse"]
    has_sparse = any(
        layer.type in ("Embedding", "EmbeddingBag") and layer.args.get("sparse") is True
        for layer in job.network.layers
    )
    return ["dense", "sparse"] if has_sparse else ["dense"]


def _run_steps(
    before: Optimizer, layouts: Sequence[str], values: Mapping[str, Any], factor: float
) -> None:
    """Run steps of an optimizer like the job's: as it was, then with new values.

    The last one is numbered as the last that a job can have. ``factor``: the multiplier of the
    learning rate.
    """
    tiny = [nn.Parameter(torch.ones(4, 4)) for _ in layouts]
    made = build_optimizer(before, tiny)

    def step() -> None:
        for parameter, layout in zip(tiny, layouts, strict=True):
            grad = torch.ones(4, 4)
            parameter.grad = grad.to_sparse(1) if layout == "sparse" else grad
        made.step()

    step()
    group = made.param_groups[0]
    group.update(values)
    if "lr" in group:
        group["lr"] *= factor
    step()
    for kept in made.state.values():
        if "step" in kept:
            is_tensor = isinstance(kept["step"], torch.Tensor)
            kept["step"] = torch.tensor(float(_LAST_STEP)) if is_tensor else _LAST_STEP
    step()


def _try_optimizer(
    before: Optimizer,
    after: Optimizer,
    layouts: Sequence[str],
    names: Sequence[str],
    prefix: str,
) -> None:
    """Check the values with torch's constructor and with steps of a tiny optimizer."""
    try:
        values = optimizer_values(after, names)
    except SpecProblems as error:
        item = error.problems[0]
        name = item.pointer.rpartition("/")[2]
        pointer = pointer_of(prefix + (name if name in names else names[0]))
        raise one(pointer, item.detail, item.code) from None
    try:
        for factor in (1.0, _HEADROOM):
            _run_steps(before, layouts, values, factor)
    except Exception as cause:
        why = f"{type(cause).__name__}: {cause}"[:200]
        detail = f"{after.type} cannot step with this value (torch: {why})"
        raise one(pointer_of(prefix + names[0]), detail + _advice(cause), "not_settable") from cause


def _advice(cause: Exception) -> str:
    text = str(cause)
    if isinstance(cause, OverflowError) or "overflow" in text:
        return ": choose a smaller one"
    if "sparse" in text:
        return ": the gradients are sparse"
    return "; it keeps nothing for it unless it started so: fork the job with it"


def _tiny(optimizer: Optimizer) -> torch.optim.Optimizer:
    return build_optimizer(optimizer, [nn.Parameter(torch.ones(4, 4))])


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
    """Return the change that caused a problem at this location in the spec."""
    for path in changes:
        where = place(path)
        if tuple(location[: len(where)]) == where:
            return pointer_of(path)
    return pointer_of(next(iter(changes)))


def pointer_of(path: str) -> str:
    """Return the JSON pointer of a change: ``optimizer.lr`` is at ``/set/optimizer.lr``."""
    escaped = path.replace("~", "~0").replace("/", "~1")
    return f"/set/{escaped}"
