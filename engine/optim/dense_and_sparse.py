"""Two optimizers as one: one of the dense gradients, one of the sparse ones.

Whoever schedules, saves, watches or withholds an update has one optimizer in hand; its groups are
the dense one's, then the sparse one's. Knows torch alone.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

SPARSE_TYPES = ("SGD", "Adagrad", "SparseAdam")
"""What torch has that takes sparse gradients."""


class DenseAndSparse(Optimizer):
    """Steps with both; groups of parameters and states are theirs, not copies."""

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
        """Hand each its own part."""
        groups = state_dict["param_groups"]
        middle = len(self.dense.param_groups)
        for half, own in ((self.dense, groups[:middle]), (self.sparse, groups[middle:])):
            numbers = {number for group in own for number in group["params"]}
            state = {key: kept for key, kept in state_dict["state"].items() if key in numbers}
            half.load_state_dict({"state": state, "param_groups": own})
        self._share()


def half_of(optimizer: Optimizer, which: str) -> Optimizer:
    """Of a pair the one that is meant: ``sparse``, or the dense one; alone it is all there is."""
    if not isinstance(optimizer, DenseAndSparse):
        return optimizer
    return optimizer.sparse if which == "sparse" else optimizer.dense


def type_of(optimizer: Optimizer) -> str:
    """The name of its class; of a pair both, the dense one's first."""
    if not isinstance(optimizer, DenseAndSparse):
        return type(optimizer).__name__
    return f"{type_of(optimizer.dense)}+{type_of(optimizer.sparse)}"


def rates_of(optimizer: Optimizer) -> dict[str, float]:
    """The learning rate in force, and the sparse half's, as the metrics call them."""
    found = {"lr": float(optimizer.param_groups[0]["lr"])}
    if isinstance(optimizer, DenseAndSparse):
        found["lr/sparse"] = float(optimizer.sparse.param_groups[0]["lr"])
    return found


def join_rows(optimizer: Optimizer, _args: Any, _keywords: Any) -> None:
    """Before a step of SGD with momentum: add up the rows that a sparse gradient has twice.

    Else torch's momentum, which is sparse like the gradients, takes on each of their rows beside
    those that it has, and grows with every step for ever.
    """
    for group in optimizer.param_groups:
        for item in group["params"] if group["momentum"] else ():
            if item.grad is not None and item.grad.layout is torch.sparse_coo:
                item.grad = item.grad.coalesce()
