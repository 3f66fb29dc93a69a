"""Skip an update: on the host if it knows in time, else on the device; check that a job can."""

import math
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine.core.problems import Findings
from engine.core.shards import is_offloaded
from engine.core.tensor_names import root
from engine.optim.optimizers import optimizer_classes
from glasshouse.spec import TrainJob


class UpdateGate:
    """Decides in each step whether the optimizer's step takes effect.

    On the CPU the numbers are available in time. On CUDA an optimizer that takes torch's
    ``found_inf`` (Adam, AdamW, SGD and Adagrad with ``fused: true``) is given a flag that the
    device computes; it changes nothing if the flag is 1. For ``fail`` the flag stays 1, so that the
    parameters stay unchanged until the host knows. For an optimizer without the flag, ``skip_step``
    waits for the device, as torch's own GradScaler does; ``fail`` does not wait. An optimizer whose
    state is in host memory waits for the gradients anyway, and so do both.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        action: Literal["fail", "skip_step", "warn"],
        *,
        is_late: bool | None = None,
        takes_flag: bool | None = None,
    ) -> None:
        """``is_late``: whether numbers arrive after the update; None: depends on the device.

        ``takes_flag``: whether the optimizer takes the flag; None: the optimizer is asked.
        """
        self._buffers = [*network.buffers()] if action == "skip_step" else []
        self._before: list[Tensor] = []
        self._optimizer: Any = optimizer
        self._action = action
        self._is_late = device.type != "cpu" if is_late is None else is_late
        knows_flag = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        trained = [item for group in optimizer.param_groups for item in group["params"]]
        self._is_on_host = any(map(is_offloaded, trained))
        self._takes_flag = knows_flag if takes_flag is None else takes_flag
        self._was_bad = False
        self._flag: Tensor | None = None
        self._has_updated = False
        self.is_shut = False
        """Whether the host skips the update of the current step."""
        if action == "skip_step" or (action == "fail" and self._is_late):
            optimizer.register_step_pre_hook(self._before_update)

    @property
    def has_skipped(self) -> bool:
        """Return whether the newest update was skipped; waits for the device if that decided."""
        if self.is_shut or self._action != "skip_step" or self._flag is None:
            return self.is_shut
        return bool(self._flag)

    @property
    def keeps(self) -> bool:
        """Return whether the parameters of a bad step are still unchanged when it is examined."""
        if not self._is_late:
            return True
        return self._action == "fail" and (self._takes_flag or self._is_on_host)

    def begin(self) -> None:
        """Start a step: save the buffers that its passes may change (batch normalization)."""
        self._before = [item.clone() for item in self._buffers]

    def shut(self) -> None:
        """Skip the update of this step, if it has not been made yet."""
        if not self._is_late:
            self._withhold()

    def _withhold(self) -> None:
        self.is_shut = True
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(before)

    @torch.no_grad()
    def take(self, numbers: Iterable[Tensor]) -> None:
        """Take a step's numbers: it is updated only if all are finite."""
        self.is_shut = False
        if not self._is_late or self._action == "warn":
            return
        if self._is_on_host:
            is_bad = not all(math.isfinite(float(item)) for item in numbers)
            self._was_bad = is_bad or (self._was_bad and self._action == "fail")
            if self._was_bad:
                self._withhold()
            return
        joined = torch.stack([item.reshape(()).to(torch.float32) for item in numbers])
        bad = ~torch.isfinite(joined).all()
        if not self._takes_flag:
            if self._action == "skip_step" and bool(bad):
                self._withhold()
        elif not self._has_updated:
            # At its first update a fused optimizer would keep state that the flag left uncomputed.
            self._has_updated = not bool(bad)
            if not self._has_updated:
                self._withhold()
        else:
            flag = bad.to(torch.float32).reshape(())
            if self._action == "fail" and self._flag is not None:
                flag = torch.maximum(flag, self._flag)
            self._optimizer.found_inf = self._flag = flag
            for buffer, before in zip(self._buffers, self._before, strict=True):
                is_bad = bad.to(buffer.device, non_blocking=True)
                buffer.copy_(torch.where(is_bad, before, buffer))

    def _before_update(self, optimizer: torch.optim.Optimizer, _args: Any, _keywords: Any) -> None:
        if self.is_shut:
            optimizer.zero_grad(set_to_none=True)  # a parameter without a gradient is not updated


def check_guards(spec: TrainJob, names: Collection[str], findings: Findings) -> None:
    """Add findings for guards that name nothing; ``names``: fields, layers and parameters."""
    guard = spec.guards.nonfinite
    known = {*names, *map(root, names)}
    for number, glob in enumerate(guard.skip):
        if not any(fnmatchcase(name, glob) for name in known):
            listed = ", ".join(dict.fromkeys(map(root, names)))
            detail = f"{glob!r} matches no field, layer or parameter; there are: {listed}"
            findings.problem(f"/guards/nonfinite/skip/{number}", detail[:2000], "no_match")
    is_on_device = spec.devices.type == "cuda" and not spec.parallel.cpu_offload
    if guard.action == "skip_step" and is_on_device:
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
