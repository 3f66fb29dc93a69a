"""Gradients of float16, scaled up on their way back by torch's GradScaler: small ones would be 0.

The loss is multiplied by a scale before the backward pass and the parameters' gradients are divided
by it behind it, so that everybody sees them as they are. Where they overflow the update is left out
and the scale becomes smaller; after many steps without that it grows. Waits for the device where
torch does: for an optimizer that is not fused.
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
    """Scales the losses and makes the updates of one optimizer; a part of its checkpoints."""

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
        """The scale of the update that was made last, or left out."""
        self._inverse: Tensor | None = None

    @property
    def scale(self) -> Tensor:
        """By how much a loss is multiplied now; waits for nothing."""
        found: Tensor = self._scaler.scale(self._one)
        return found

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """The backward pass of a batch; behind the last one of a step gradients are unscaled."""
        self._scaler.scale(loss).backward()
        if is_last:
            self._scaler.unscale_(self._optimizer)

    def unscaled(self, gradient: Tensor) -> Tensor:
        """A gradient by an output as it is without the scale, in float32."""
        if self._inverse is None:
            self._inverse = self.scale.double().reciprocal().float()
        return gradient.float() * self._inverse

    def step(self) -> None:
        """Update the parameters, where all gradients are finite; and choose the next scale."""
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
        """Whether the newest update was skipped because gradients overflowed. Waits for it."""
        return bool(self._has_skipped)

    def figures(self) -> dict[str, Tensor]:
        """Of the newest step: its scale, and how many steps have overflowed so far."""
        used = self.scale if self._used is None else self._used
        return {"loss_scale": used, "overflowed_steps": self._overflowed}

    def state(self) -> State:
        """The scale and what it hangs on. Waits for the device."""
        known = self._scaler.state_dict()
        kept = {"scale": known["scale"], "since": known["_growth_tracker"]}
        return {**kept, "overflowed": int(self._overflowed), "has_updated": self._has_updated}

    def restore(self, state: State) -> None:
        """Go on from there, by the rules of this job."""
        saved = {"scale": float(state["scale"]), "_growth_tracker": int(state["since"])}
        self._scaler.load_state_dict({**self._scaler.state_dict(), **saved})
        self._overflowed.fill_(int(state["overflowed"]))
        self._has_updated = bool(state["has_updated"])


@contextlib.contextmanager
def _waiting(optimizer: torch.optim.Optimizer) -> Generator[None]:
    """In here it is not called where gradients overflow, as an optimizer that is not fused.

    A fused SGD that is told to do nothing at its first step keeps a momentum that it has not
    computed, and goes on with it: NaN.
    """
    name = "_step_supports_amp_scaling"
    known = vars(optimizer).get(name)
    vars(optimizer)[name] = False
    try:
        yield
    finally:
        vars(optimizer)[name] = known
