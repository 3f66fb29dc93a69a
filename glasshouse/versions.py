"""Minimum versions of other programs."""

LEAST_BROKER = {"valkey": (8, 0, 0), "redis": (7, 4, 6)}
"""Older Redis has the vulnerability CVE-2025-49844."""
SAFE_SQLITE = (3, 51, 3)
"""From 3.7.0 on and before this, SQLite has the WAL-reset bug."""


def numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``8.1.3`` → (8, 1, 3)."""
    found: list[int] = []
    for part in text.split("."):
        digits = "".join(char for char in part if char.isdigit())
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)
