"""How the rows of a batch are divided over processes and micro-batches. Pure arithmetic."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Division:
    """Divides each batch into one shard per process, and each shard into micro-batches.

    Shards and micro-batches are runs of adjacent rows whose sizes differ by at most one. Every row
    is in exactly one of them. All processes have as many micro-batches of a batch.
    """

    parts: int = 1
    """Micro-batches of a shard; fewer if the largest shard has fewer rows."""
    num_ranks: int = 1
    rank: int = 0
    """The process whose micro-batches these are."""

    @property
    def is_whole(self) -> bool:
        """Whether a batch stays whole."""
        return self.parts == 1 and self.num_ranks == 1

    def sizes(self, num_rows: int) -> list[int]:
        """Return the rows of each own micro-batch of a batch; 0 if the shard has too few rows."""
        own = self._shard(num_rows)
        largest = -(-num_rows // self.num_ranks)
        sizes = sizes_of_parts(own.stop - own.start, self.parts)
        # first, so that the last one, which probes watch, has rows
        return [0] * (min(self.parts, largest) - len(sizes)) + sizes

    def own(self, run: slice) -> Iterator[slice]:
        """Yield the own micro-batches of a batch, one after another.

        For a micro-batch without a row, yield the first row of the batch: every process runs as
        many passes as the others, and the result is multiplied by 0.
        """
        shard = self._shard(run.stop - run.start)
        start = run.start + shard.start
        for size in self.sizes(run.stop - run.start):
            if not size:
                yield slice(run.start, run.start + 1)
                continue
            yield slice(start, start + size)
            start += size

    def _shard(self, num_rows: int) -> slice:
        least, more = divmod(num_rows, self.num_ranks)
        start = self.rank * least + min(self.rank, more)
        return slice(start, start + least + (self.rank < more))


WHOLE = Division()
"""A batch is not divided."""


def sizes_of_parts(num_rows: int, parts: int) -> list[int]:
    """Return the number of rows of each part: as equal as possible, and none is empty.

    Without rows there is one part: [0].
    """
    parts = max(1, min(parts, num_rows))
    least, more = divmod(num_rows, parts)
    return [least + 1] * more + [least] * (parts - more)
