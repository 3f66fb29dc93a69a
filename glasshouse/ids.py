"""Prefixed, time-ordered ids."""

import re
import secrets
import time

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u
PREFIXES = ("job", "ds", "net", "ckpt", "prb", "cap", "cmd", "key", "whk", "msg", "mdl", "rec")
_PATTERN = re.compile(rf"({'|'.join(PREFIXES)})_[{ALPHABET}]{{26}}")


def new_id(prefix: str, *, at_ms: int | None = None) -> str:
    """Make an id such as ``job_01jc…``: 48 bits of Unix milliseconds, then 80 random bits.

    Ids of one prefix sort by the time they were made, to the millisecond.
    """
    if prefix not in PREFIXES:
        raise ValueError(f"{prefix!r} is not an id prefix; the prefixes are {', '.join(PREFIXES)}")
    milliseconds = time.time_ns() // 1_000_000 if at_ms is None else at_ms
    number = (milliseconds << 80) | secrets.randbits(80)
    digits = [ALPHABET[(number >> shift) & 31] for shift in range(125, -5, -5)]
    return f"{prefix}_{''.join(digits)}"


def is_id(text: str, prefix: str) -> bool:
    """Whether a text has the form of an id of this prefix (not whether it exists)."""
    match = _PATTERN.fullmatch(text)
    return match is not None and match.group(1) == prefix
