"""Fold the blocks of a job's statistics into chunks of one series each.

A fold has a number. Its chunks are stored in several short transactions and become visible in the
transaction that writes the fold's row and deletes its blocks. The next fold overwrites an aborted
one. Every transaction is fenced, so only the attempt that has the job folds.
"""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import delete, insert, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from models.observations import unfolded_stats
from models.observations.stats import FORMS, Form, last_fold
from models.observations.stats_bytes import Data, Gathered, StatsArrays, StoredSeries, pack_chunk
from models.observations.unfolded_stats import StatsOwner
from models.tables import Job, StatsBlock, StatsChunk, StatsFold, StatsSeries, core

_PORTION_BYTES = 512 << 10


class FoldedChunk(NamedTuple):
    """One chunk to store."""

    attempt: int
    form: Form
    series: StoredSeries
    steps: tuple[int, int]
    last: tuple[int, bytes]
    data: bytes


class Fold(NamedTuple):
    """Blocks that were read, sorted by series."""

    blocks: list[int]
    found: list[tuple[int, Form, StoredSeries, Data]]

    def portions(self) -> Generator[list[FoldedChunk]]:
        """Compress the series in portions, each for one short transaction."""
        portion: list[FoldedChunk] = []
        size = 0
        for attempt, form, series, data in self.found:
            size += data.size_bytes
            portion.append(_piece(attempt, form, series, data))
            if size >= _PORTION_BYTES:
                yield portion
                portion, size = [], 0
        if portion:
            yield portion


def _piece(attempt: int, form: Form, series: StoredSeries, data: Data) -> FoldedChunk:
    steps = data.steps
    latest = int(steps.argmax())
    last = data.values[:, latest].astype("<f8").tobytes() if isinstance(data, StatsArrays) else b""
    ends = int(steps.min()), int(steps.max())
    return FoldedChunk(attempt, form, series, ends, (ends[1], last), pack_chunk(data))


def read(tx: Session, job: str) -> Fold | None:
    """Read the oldest blocks of a job, up to the size of one fold; None if there are none."""
    blocks: list[int] = []
    gathered = {form: Gathered() for form in FORMS}
    size = 0
    wanted = (
        select(StatsBlock.id, StatsBlock.attempt, StatsBlock.form, StatsBlock.data)
        .where(StatsBlock.job == job)
        .order_by(StatsBlock.id)
        .limit(unfolded_stats.MAX_BLOCKS)
        .execution_options(yield_per=64)
    )
    for row in tx.execute(wanted):
        form: Form = row.form
        gathered[form].add(row.attempt, row.data)
        blocks.append(row.id)
        size += len(row.data)
        if size >= unfolded_stats.MAX_BYTES:
            break
    if not blocks:
        return None
    found: list[tuple[int, Form, StoredSeries, Data]] = [
        (attempt, form, series, data)
        for form in FORMS
        for (attempt, series), data in gathered[form].by_series().items()
    ]
    return Fold(blocks, found)


def begin(tx: Session, owner: StatsOwner) -> int | None:
    """Return the number of the next fold, and delete what an aborted fold left.

    None: another attempt has the job.
    """
    if not _holds(tx, owner):
        return None
    number = last_fold(tx, owner.job) + 1
    mine = select(StatsSeries.id).where(StatsSeries.job == owner.job)
    tx.execute(delete(StatsChunk).where(StatsChunk.fold >= number, StatsChunk.series.in_(mine)))
    return number


def store(tx: Session, owner: StatsOwner, number: int, portion: Sequence[FoldedChunk]) -> bool:
    """Store chunks of a fold. False: another attempt has the job."""
    if not _holds(tx, owner):
        return False
    ids = _series_ids(tx, owner.job, portion)
    rows = [
        {
            "series": series,
            "fold": number,
            "from_step": piece.steps[0],
            "to_step": piece.steps[1],
            "data": piece.data,
        }
        for series, piece in zip(ids, portion, strict=True)
    ]
    tx.execute(insert(core(StatsChunk)), rows)
    return True


def finish(tx: Session, owner: StatsOwner, number: int, blocks: Sequence[int]) -> bool:
    """Replace the blocks of a fold by its chunks. False: another attempt has the job."""
    if not _holds(tx, owner):
        return False
    tx.execute(insert(core(StatsFold)), [{"job": owner.job, "n": number}])
    tx.execute(
        delete(StatsBlock).where(StatsBlock.job == owner.job, StatsBlock.id.in_(list(blocks)))
    )
    return True


def _holds(tx: Session, owner: StatsOwner) -> bool:
    """Return whether this is still the attempt of the job, even after the job's end."""
    held = select(Job.id).where(Job.id == owner.job, Job.fence == owner.fence)
    return tx.scalar(held.with_for_update(read=True)) is not None


def _series_ids(tx: Session, job: str, portion: Sequence[FoldedChunk]) -> list[int]:
    """Return the ids of the series, creating new ones, and store the last row of each."""
    dialect: Any = postgresql if tx.get_bind().dialect.name == "postgresql" else sqlite
    found: list[int] = []
    for piece in portion:
        row = piece.series._asdict() | {"job": job, "attempt": piece.attempt, "form": piece.form}
        row |= {"last_step": piece.last[0], "last": piece.last[1]}
        query = dialect.insert(core(StatsSeries)).values(row)
        query = query.on_conflict_do_update(
            index_elements=["job", "attempt", "form", "layer", "kind", "phase", "rank"],
            set_={"last_step": query.excluded.last_step, "last": query.excluded.last},
        )
        found.append(tx.execute(query.returning(StatsSeries.id)).scalar_one())
    return found
