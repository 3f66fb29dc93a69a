"""Scale float16 gradients with torch's GradScaler, because small ones would underflow to 0.

The loss is multiplied by a scale before the backward pass. The parameters' gradients are divided by
it afterwards, so all other code sees them unscaled. If they overflow, the update is skipped and the
scale shrinks; after many steps without overflow it grows. Waits for the device only where torch
does: for an optimizer that is not fused.
"""

import contextlib
from collections.abc import Generator

import torch
from torch import Tensor

from engine.core.snapshot import State
from glasshouse.spec import GradScaler

MIN_SCALE = 1e-4
"""Below it gradients overflow however little they are scaled: fairseq's ``min_loss_scale``."""


class GradScaling:
    """Scales the losses and steps one optimizer. Saved in checkpoints."""

    def __init__(
        self, spec: GradScaler | None, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        spec = spec or GradScaler()
        self._scaler = torch.amp.GradScaler(
            device.type,
            init_scale=spec.init_scale,
            growth_factor=spec.growth_factor,
            backoff_factor=spec.backoff_factor,
            growth_interval=spec.growth_interval,
        )
        self._optimizer = optimizer
        self._one = torch.ones((), device=device)
        self._overflowed = torch.zeros((), dtype=torch.float64, device=device)
        self._has_updated = False
        self._has_skipped = torch.zeros((), dtype=torch.bool, device=device)
        self._used: Tensor | None = None
        """The scale of the last update, whether applied or skipped."""
        self._inverse: Tensor | None = None

    @property
    def scale(self) -> Tensor:
        """The factor that a loss is multiplied by now. Does not wait for the device."""
        found: Tensor = self._scaler.scale(self._one)
        return found

    def scale_on(self, device: torch.device) -> Tensor:
        """Return the factor on a device; that of the losses may be another one."""
        return self.scale.to(device, non_blocking=True)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Run the backward pass of a batch; after the last one of a step, unscale the gradients."""
        self._scaler.scale(loss).backward()
        if is_last:
            self._scaler.unscale_(self._optimizer)

    def unscaled(self, gradient: Tensor) -> Tensor:
        """Return the gradient with respect to an output without the scale, in float32."""
        if self._inverse is None:
            self._inverse = self.scale.double().reciprocal().float()
        return gradient.float() * self._inverse.to(gradient.device, non_blocking=True)

    def step(self) -> None:
        """Update the parameters if all gradients are finite, and compute the next scale."""
        self._used = self.scale
        with contextlib.nullcontext() if self._has_updated else _waiting(self._optimizer):
            self._scaler.step(self._optimizer)
        self._scaler.update()
        self._has_skipped = has_overflowed = self.scale < self._used
        self._overflowed += has_overflowed
        self._has_updated = self._has_updated or not bool(has_overflowed)
        self._inverse = None

    @property
    def has_skipped(self) -> bool:
        """Whether the last update was skipped because gradients overflowed. Blocks until known."""
        return bool(self._has_skipped)

    def figures(self) -> dict[str, Tensor]:
        """Return the scale of the last step, and how many steps have overflowed so far."""
        used = self.scale if self._used is None else self._used
        return {"loss_scale": used, "overflowed_steps": self._overflowed}

    def state(self) -> State:
        """Return the scale and the counters that it depends on. Waits for the device."""
        known = self._scaler.state_dict()
        kept = {"scale": known["scale"], "since": known["_growth_tracker"]}
        return {**kept, "overflowed": int(self._overflowed), "has_updated": self._has_updated}

    def restore(self, state: State) -> None:
        """Continue from a saved state, with the growth and backoff of this job."""
        saved = {"scale": float(state["scale"]), "_growth_tracker": int(state["since"])}
        self._scaler.load_state_dict({**self._scaler.state_dict(), **saved})
        self._overflowed.fill_(int(state["overflowed"]))
        self._has_updated = bool(state["has_updated"])


@contextlib.contextmanager
def _waiting(optimizer: torch.optim.Optimizer) -> Generator[None]:
    """Treat the optimizer as not fused: GradScaler does not call it if gradients overflow.

    A fused SGD that skips its first step keeps a momentum buffer that was never computed, and later
    steps use it: NaN.
    """
    name = "_step_supports_amp_scaling"
    known = vars(optimizer).get(name)
    vars(optimizer)[name] = False
    try:
        yield
    finally:
        vars(optimizer)[name] = known
