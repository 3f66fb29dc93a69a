"""Check the guards of a spec before anything runs."""

from collections.abc import Collection
from fnmatch import fnmatchcase

from engine.core.problems import Findings
from engine.core.tensor_names import root
from engine.optim.optimizers import optimizer_classes
from glasshouse.spec import TrainJob


def check_guards(spec: TrainJob, names: Collection[str], findings: Findings) -> None:
    """Add findings for guards that name nothing; ``names``: fields, layers and parameters."""
    guard = spec.guards.nonfinite
    known = {*names, *map(root, names)}
    for number, glob in enumerate(guard.skip):
        if not any(fnmatchcase(name, glob) for name in known):
            listed = ", ".join(dict.fromkeys(map(root, names)))
            detail = f"{glob!r} matches no field, layer or parameter; there are: {listed}"
            findings.problem(f"/guards/nonfinite/skip/{number}", detail[:2000], "no_match")
    if guard.action == "skip_step" and spec.devices.type == "cuda":
        _check_waiting(spec, findings)


def _check_waiting(spec: TrainJob, findings: Findings) -> None:
    """Require a fused optimizer on CUDA: only that one can skip an update on the device."""
    made = optimizer_classes().get(spec.optimizer.type)
    is_fused = spec.optimizer.args.get("fused") is True and spec.optimizer.sparse is None
    if made is None:
        return
    if is_fused:
        if spec.scheduler is not None or spec.average is not None:
            detail = "each step waits for the device: scheduler and average leave out skipped steps"
            findings.warn("/guards/nonfinite/action", detail, "waits")
        return
    detail = "each step waits for the device, so that it can be skipped"
    takes_flag = spec.optimizer.type in ("Adam", "AdamW", "SGD", "Adagrad")
    if takes_flag and spec.optimizer.sparse is None:
        detail += ": with the optimizer's argument fused: true none does"
    findings.warn("/guards/nonfinite/action", detail, "waits")
