"""Combine two optimizers into one: one for dense gradients, one for sparse ones.

Code that schedules, saves, watches or skips an update handles a single optimizer. Its parameter
groups are the dense one's, then the sparse one's. Depends on torch only.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

SPARSE_TYPES = ("SGD", "Adagrad", "SparseAdam")
"""The optimizers of torch that accept sparse gradients."""


class DenseAndSparse(Optimizer):
    """Steps both optimizers. It shares their parameter groups and states, without copies."""

    def __init__(self, dense: Optimizer, sparse: Optimizer) -> None:
        self.dense, self.sparse = dense, sparse
        super().__init__([*dense.param_groups, *sparse.param_groups], {})
        self.defaults = dense.defaults
        self._share()

    def _share(self) -> None:
        self.param_groups = [*self.dense.param_groups, *self.sparse.param_groups]
        self.state.clear()
        for half in (self.dense, self.sparse):
            self.state.update(half.state)
            half.state = self.state

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the parameters of both."""
        self.dense.step()
        self.sparse.step()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Load each optimizer's part."""
        groups = state_dict["param_groups"]
        middle = len(self.dense.param_groups)
        for half, own in ((self.dense, groups[:middle]), (self.sparse, groups[middle:])):
            numbers = {number for group in own for number in group["params"]}
            state = {key: kept for key, kept in state_dict["state"].items() if key in numbers}
            half.load_state_dict({"state": state, "param_groups": own})
        self._share()


def half_of(optimizer: Optimizer, which: str) -> Optimizer:
    """Return the ``sparse`` or the dense optimizer of a pair; a single optimizer as it is."""
    if not isinstance(optimizer, DenseAndSparse):
        return optimizer
    return optimizer.sparse if which == "sparse" else optimizer.dense


def type_of(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class; of a pair both, the dense one's first."""
    if not isinstance(optimizer, DenseAndSparse):
        return type(optimizer).__name__
    return f"{type_of(optimizer.dense)}+{type_of(optimizer.sparse)}"


def rates_of(optimizer: Optimizer) -> dict[str, float]:
    """Return the current learning rates by metric name: ``lr`` and, for a pair, ``lr/sparse``."""
    found = {"lr": float(optimizer.param_groups[0]["lr"])}
    if isinstance(optimizer, DenseAndSparse):
        found["lr/sparse"] = float(optimizer.sparse.param_groups[0]["lr"])
    return found


def join_rows(optimizer: Optimizer, _args: Any, _keywords: Any) -> None:
    """Add up duplicate rows of sparse gradients before a step of SGD with momentum.

    Otherwise torch's momentum, which is sparse like the gradients, appends all their rows to the
    ones that it has, and grows with every step.
    """
    for group in optimizer.param_groups:
        for item in group["params"] if group["momentum"] else ():
            if item.grad is not None and item.grad.layout is torch.sparse_coo:
                item.grad = item.grad.coalesce()
