"""The process of a job with several whose own values a series or a tensor has."""

MERGED = -1
"""Instead of a rank: the values of all processes together."""


def shown(rank: int) -> int | None:
    """Return the rank as the API shows it: None for all processes together."""
    return None if rank == MERGED else rank
