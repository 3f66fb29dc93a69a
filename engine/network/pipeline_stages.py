"""The layers of a network by the stages of a pipeline, and the values that pass between stages.

A value that a later stage, a loss or a metric reads passes through every stage on its way. Data
fields pass nowhere: each process reads the rows itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.network.layers import Runnable


@dataclass(frozen=True)
class Stage:
    """One stage: what it runs, and what it reads and gives."""

    number: int
    reads: tuple[str, ...]
    """The values that the previous stage gives, in order."""
    gives: tuple[str, ...]
    """The values that the next stage reads, in order; empty for the last one."""
    plan: Sequence[Runnable]
    overwrites: bool
    """Whether a layer may change what it reads."""
