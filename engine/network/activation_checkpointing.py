"""Activation checkpointing: recompute layers' activations in the backward pass to save memory.

Uses torch.utils.checkpoint (non-reentrant) around segments of layers. Only a segment's inputs stay
in memory; the backward pass recomputes the rest with the same random numbers. Hooks do not run for
the recomputation, and buffers keep their values. Depends on torch, not on graphs.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Leaves = dict[str, Tensor]
Made = dict[str, Tensor | Leaves]
"""The outputs of layers, by name: a tensor, or several tensors by their names."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Item(Protocol):
    """A step of the plan: one layer, or layers that run together."""

    @property
    def name(self) -> str:
        """The name under which its output is stored."""
        ...

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of all values that it needs."""
        ...

    @property
    def finished(self) -> tuple[str, ...]:
        """The layers whose output no later item reads."""
        ...

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that it calls."""
        ...


Run = Callable[..., None]
"""Runs items. Takes the items, the current values and the leaves of tuples, and adds to both."""


class Segment:
    """A run of layers of which only the inputs stay in memory."""

    def __init__(self, items: Sequence[Item], run: Run) -> None:
        self.items = tuple(items)
        self._run = run
        self.name = self.items[0].name
        made = {item.name for item in self.items}
        self.reads = tuple(dict.fromkeys(name for item in self.items for name in item.reads))
        self.finished = tuple(
            name for item in self.items for name in item.finished if name not in made
        )
        """Layers outside the segment whose output is no longer needed after it."""
        found = (
            inner for item in self.items for module in item.modules for inner in module.modules()
        )
        self.modules = tuple(dict.fromkeys(found))
        self._is_again = False

    def run(self, values: Mapping[str, Tensor]) -> Made:
        """Return the outputs of its layers that later layers read."""
        given = {name: values[name] for name in self.reads if name in values}
        if not torch.is_grad_enabled():
            return self._forward([*given], *given.values())
        found: Made = checkpoint(
            partial(self._forward, [*given]),
            *given.values(),
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), self._again()),
        )
        return found

    def _forward(self, names: Sequence[str], *tensors: Tensor) -> Made:
        values = dict(zip(names, tensors, strict=True))
        tuples: dict[str, Leaves] = {}
        self._run(self.items, values, tuples, bare=self._is_again)
        made = (item.name for item in self.items)
        return {name: tuples.get(name, values[name]) for name in made if name in values}

    @contextlib.contextmanager
    def _again(self) -> Generator[None]:
        """Disable hooks in this context, and discard its changes to buffers."""
        hooks = [
            (vars(module), name, vars(module)[name])
            for module in self.modules
            for name in _HOOKS
            if vars(module)[name]
        ]
        buffers = [
            (module._buffers, name, buffer)  # pyright: ignore[reportPrivateUsage]
            for module in self.modules
            for name, buffer in module._buffers.items()  # pyright: ignore[reportPrivateUsage]
            if buffer is not None
        ]
        self._is_again = True
        for owner, name, _ in hooks:
            owner[name] = OrderedDict()
        for owner, name, buffer in buffers:
            owner[name] = buffer.clone()
        try:
            yield
        finally:
            self._is_again = False
            for owner, name, kept in (*hooks, *buffers):
                owner[name] = kept


def segmented(items: Sequence[Any], kept_at: Iterable[str], run: Run) -> list[Any]:
    """Group the items between two checkpoint boundaries into segments.

    Items before the first boundary, and from the last one on, stay as they are.
    """
    begins, found, part = {*kept_at}, [], []
    is_inside = False
    for item in items:
        if item.first in begins:
            found += [Segment(part, run)] if is_inside and part else part
            part, is_inside = [], True
        part.append(item)
    return found + part
