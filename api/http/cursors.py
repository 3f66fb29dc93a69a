"""Parse cursors of event logs: one number, or ``job:seq`` pairs. Pure functions."""

import re
from collections.abc import Sequence

from api.http.answers import bad_parameter
from glasshouse.errors import InvalidCursor
from glasshouse.events import EVENT_TYPES

_SEQ = re.compile(r"[0-9]{1,18}")


def seq_of(text: str | None, last_seq: int) -> int:
    """Return the number of the last event that the reader has; 0 without a cursor.

    Raises:
        InvalidCursor: It is not a number, or the log has no such event.
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
    """Return the cursor of each job in ``job:seq,job:seq``.

    A job without one starts at its first event.

    Raises:
        InvalidCursor: It has another form, or names a job that is not streamed.
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
    """Return the requested event types, given repeatedly or separated by commas. None: all.

    Raises:
        InvalidRequest: One is not an event type.
    """
    names = {name for text in given or () for name in text.split(",") if name}
    unknown = sorted(names - set(EVENT_TYPES))
    if unknown:
        known = ", ".join(EVENT_TYPES)
        raise bad_parameter("types", f"{unknown[0][:100]!r} is none of {known}.")
    return frozenset(names) or None
