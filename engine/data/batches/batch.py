"""A batch: the rows that a network is given at once, as tensors by name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Taken = Tensor | slice
"""The rows of a batch, by their positions in their source."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Mapping[str, Tensor]):
    """Some rows of a source. As a mapping: its tensors by name."""

    tensors: Mapping[str, Tensor]
    """Each field's tensor by name, and the lengths of its sequences: ``text``, ``text.lengths``."""
    lengths: Mapping[str, Tensor]
    """The lengths of the rows of each sequence field, in host memory."""
    taken: Taken
    """Its rows, by their positions in the source: ``Rows.batch`` makes the same batch of them."""
    trained_in: int | None = None
    """The epoch that the rows were augmented for; None: they were not augmented."""
    numbered: Tensor | None = None
    """The row numbers of the whole source; None: positions are row numbers."""

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor."""
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.tensors)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.tensors)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return next(iter(self.tensors.values())).shape[0]

    @property
    def row_numbers(self) -> Tensor:
        """The numbers of the rows in their split."""
        return numbers_of(self.taken, self.numbered)


def numbers_of(taken: Taken, numbered: Tensor | None) -> Tensor:
    """Return the row numbers of positions; ``numbered``: those of all; None: the positions."""
    if numbered is not None:
        return numbered[taken]
    return torch.arange(taken.start, taken.stop) if isinstance(taken, slice) else taken
