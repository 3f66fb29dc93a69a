"""What a job computes from its training rows before the first step, as a part of its checkpoints.

These are the statistics to normalize and fill with, and vocabularies. They are computed once. A job
that resumes from the checkpoint, or inference with its network, reads them from there.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.checkpoint.checkpoint import read_part
from engine.core.snapshot import State
from engine.data.columns.checks import OnBadRow
from engine.data.columns.normalization import ColumnFigures
from engine.data.columns.vocabulary import Tokens
from glasshouse.errors import CheckpointMismatch
from glasshouse.spec import Data, Normalize, Windows

PART = "data"
"""The name of this part in a checkpoint."""
WINDOWS = "data.windows"
"""The key of a windows vocabulary, in place of a field's name; no field name contains a dot."""
_FIGURES = ("fill", "shift", "divisor")


@dataclass
class Prepared:
    """Statistics and vocabularies by field; empty if a job needs none."""

    figures: dict[str, ColumnFigures] = field(default_factory=dict[str, ColumnFigures])
    tokens: dict[str, Tokens] = field(default_factory=dict[str, Tokens])

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to save."""
        return not self.figures and not self.tokens

    def state(self) -> State:
        """Return statistics as float64 tensors, vocabularies as the bytes of a JSON list."""
        found: State = {}
        for name, figures in self.figures.items():
            for key in _FIGURES:
                if (values := getattr(figures, key)) is not None:
                    found[f"{name}.{key}"] = torch.from_numpy(values)
        for name, tokens in self.tokens.items():
            text = json.dumps(tokens.listed, ensure_ascii=False).encode()
            found[f"{name}.tokens"] = torch.from_numpy(np.frombuffer(text, np.uint8).copy())
        return found

    def restore(self, state: State) -> None:
        """Check that the current rows were prepared with the same values.

        Raises:
            CheckpointMismatch: they were not.
        """
        mine = self.state()
        wrong = [
            name for name in {**mine, **state} if not _is_same(mine.get(name), state.get(name))
        ]
        if wrong:
            detail = f"The checkpoint's {min(wrong)} of the data is not the job's."
            raise CheckpointMismatch(detail)

    @staticmethod
    def read(state: Mapping[str, Any]) -> "Prepared":
        """Read what `state` returned.

        Raises:
            CheckpointMismatch: it is something else.
        """
        figures: dict[str, dict[str, Any]] = {}
        found = Prepared()
        try:
            for whole, tensor in state.items():
                name, _, key = whole.rpartition(".")
                if key == "tokens":
                    found.tokens[name] = _unpacked(tensor)
                elif key in _FIGURES:
                    figures.setdefault(name, {})[key] = tensor.numpy().astype(np.float64)
        except (AttributeError, TypeError, ValueError) as cause:
            detail = f"The checkpoint's {PART} is not what was learned from rows: {cause!r}"
            raise CheckpointMismatch(detail[:500]) from cause
        found.figures = {name: ColumnFigures(**item) for name, item in figures.items()}
        return found

    def alike(self, before: Data, after: Data) -> "Prepared":
        """Return what two jobs request in the same way; the rest must be computed again."""
        kept = Prepared()
        for name, figures in self.figures.items():
            if _figures_asked(before, name) == _figures_asked(after, name):
                kept.figures[name] = figures
        for name, tokens in self.tokens.items():
            if _tokens_asked(before, name) == _tokens_asked(after, name):
                kept.tokens[name] = tokens
        return kept

    @staticmethod
    def of(checkpoint: Path) -> "Prepared":
        """Read a checkpoint's; empty if it has none.

        Raises:
            CheckpointDamaged: its file does not match the manifest.
        """
        return Prepared.read(read_part(checkpoint, PART))


def _figures_asked(data: Data, name: str) -> list[Any]:
    """Return what the statistics of a field depend on besides the rows."""
    mine = data.fields.get(name)
    asked = [getattr(mine, key, None) for key in ("type", "fill", "scale", "shape", "columns")]
    return [data.normalize.get(name), *asked]


def _tokens_asked(data: Data, name: str) -> list[Any]:
    """Return what a vocabulary depends on besides the rows and its size."""
    if name == WINDOWS:
        windows = data.windows
        return [] if windows is None else [windows.tokens, windows.vocabulary.given]
    mine = data.fields.get(name)
    vocabulary = getattr(mine, "vocabulary", None)
    return [getattr(mine, "tokens", None), None if vocabulary is None else vocabulary.given]


def _unpacked(tensor: Tensor) -> Tokens:
    listed = json.loads(tensor.numpy().tobytes())
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):  # pyright: ignore[reportUnknownVariableType]
        raise ValueError("a vocabulary is a list of texts")
    return Tokens(listed)  # pyright: ignore[reportUnknownArgumentType]


def _is_same(mine: Any, other: Any) -> bool:
    both = isinstance(mine, Tensor) and isinstance(other, Tensor)
    return both and torch.equal(mine, other)


@dataclass(frozen=True)
class Preparing:
    """How rows are prepared for the network, in addition to the options of their fields."""

    normalize: Mapping[str, Normalize] = field(default_factory=dict[str, Normalize])
    windows: Windows | None = None
    on_bad_row: OnBadRow = "fail"
    known: Prepared | None = None
    """Known statistics and vocabularies; None: compute them from these rows."""

    @staticmethod
    def of(data: Data, known: Prepared | None = None) -> "Preparing":
        """Return a job's."""
        return Preparing(data.normalize, data.windows, data.on_bad_row, known)
