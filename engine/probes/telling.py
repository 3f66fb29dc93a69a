"""From the figures of one look to records: what is told at once, and what a recorder keeps."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from engine.probes.kernel import NUM_FIGURES
from engine.probes.recorder import Recorder
from engine.probes.watch import Watch
from engine.readback import Readback

Emit = Callable[[dict[str, Any]], None]
Seen = tuple[str, str, Any]


def tell(
    record: Mapping[str, Any],
    rows: Sequence[Seen],
    looking: Sequence[Watch],
    loss: Tensor | None,
    *,
    emit: Emit,
    readback: Readback,
) -> None:
    """Send the figures of a look, when they have arrived, to whoever wants them.

    ``record`` is the record without its rows; ``loss`` is read only where somebody records.
    """
    recorders = [watch for watch in looking if isinstance(watch, Recorder)]
    telling = [watch for watch in looking if not isinstance(watch, Recorder)]
    names = [(layer, kind) for layer, kind, _ in rows]

    # Beside tensors on a device there are scalars that the optimizer keeps in CPU memory.
    known = [None if isinstance(found, Tensor) else found for _, _, found in rows]
    last = [loss.detach()] if recorders and loss is not None else []

    def then(flat: list[float]) -> None:
        arrived = iter(flat)
        table: list[list[Any]] = [
            [*name, *(islice(arrived, NUM_FIGURES) if there is None else there)]
            for name, there in zip(names, known, strict=True)
        ]
        if not recorders:
            emit({**record, "rows": table})
            return
        now = [row for row in table if any(watch.has_seen(row[1], row[0]) for watch in telling)]
        if now:
            emit({**record, "rows": now})
        told = {(row[0], row[1]) for row in now}
        value = 0.0 if loss is None else flat[-1]
        for recorder in recorders:
            seen = [row for row in table if recorder.has_seen(row[1], row[0])]
            for late in recorder.take(record, seen, value, told):
                emit(late)

    coming = [found for _, _, found in rows if isinstance(found, Tensor)] + last
    if any(not item.is_cpu for item in coming):
        readback.put(coming, then)
    elif rows or last:
        then([value for item in coming for value in item.reshape(-1).tolist()])
