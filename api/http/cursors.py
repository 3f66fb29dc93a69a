"""Where a reader of event logs stands: one number, or ``job:seq`` pairs. Pure."""

import re
from collections.abc import Sequence

from api.http.answers import bad_parameter
from glasshouse.errors import InvalidCursor
from glasshouse.events import EVENT_TYPES

_SEQ = re.compile(r"[0-9]{1,18}")


def seq_of(text: str | None, last_seq: int) -> int:
    """The number of the last event that the reader has; without a cursor 0, before the first.

    Raises:
        InvalidCursor: it is no number, or the log has no such event.
    """
    if not text:
        return 0
    if not _SEQ.fullmatch(text):
        raise InvalidCursor("The cursor of an event log is the 'seq' of an event: a whole number.")
    seq = int(text)
    if seq > last_seq:
        raise InvalidCursor(f"The log has no event {seq}; its newest is {last_seq}.")
    return seq


def pairs_of(text: str | None, jobs: Sequence[str]) -> dict[str, str]:
    """The cursor of each job in ``job:seq,job:seq``; one that is left out begins at its first.

    Raises:
        InvalidCursor: it has another form, or names a job that is not streamed.
    """
    found: dict[str, str] = {}
    for pair in text.split(",") if text else ():
        job, _, seq = pair.partition(":")
        if job not in jobs or job in found:
            raise InvalidCursor(
                "The cursor of a stream of several jobs is 'job_…:seq,job_…:seq', each job of "
                "the stream at most once."
            )
        found[job] = seq
    return found


def types_of(given: Sequence[str] | None) -> frozenset[str] | None:
    """The event types asked for, separated by commas or given several times; None means all.

    Raises:
        InvalidRequest: one is not a type of event.
    """
    names = {name for text in given or () for name in text.split(",") if name}
    unknown = sorted(names - set(EVENT_TYPES))
    if unknown:
        known = ", ".join(EVENT_TYPES)
        raise bad_parameter("types", f"{unknown[0][:100]!r} is none of {known}.")
    return frozenset(names) or None
