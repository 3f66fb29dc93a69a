"""Expresses shape changes as layers that work for every batch size, from samples of two sizes."""

from collections.abc import Sequence
from typing import Any

from glasshouse.client.modules.source_lines import Stopped

Shape = tuple[int, ...]
Change = tuple[str, dict[str, Any]]


def reshaping(before: Sequence[Shape], after: Sequence[Shape]) -> list[Change]:
    """The functions that map the shapes before to those after, for any batch size.

    Raises:
        Stopped: the varying sizes are ambiguous.
    """
    if list(before) == list(after):
        return []
    if len({len(shape) for shape in after}) > 1:
        raise Stopped("a number of axes that differs between batches")
    sizes = [one[0] if len(set(one)) == 1 else -1 for one in zip(*after, strict=True)]
    if sizes.count(-1) <= 1:
        return [("reshape", {"shape": sizes})]
    change = _merged(before, after) or _split(before, after)
    if change is None:
        raise Stopped("a shape in which more than one size differs between batches")
    return [change]


def _merged(before: Sequence[Shape], after: Sequence[Shape]) -> Change | None:
    """A flatten of adjacent axes, or None."""
    more = len(before[0]) - len(after[0])
    if more < 1:
        return None
    for first in range(len(after[0])):
        last = first + more
        both = list(zip(before, after, strict=True))
        if all(
            old[:first] == new[:first] and old[last + 1 :] == new[first + 1 :] for old, new in both
        ):
            return "flatten", {"start_dim": first, "end_dim": last}
    return None


def _split(before: Sequence[Shape], after: Sequence[Shape]) -> Change | None:
    """An unflatten of one axis into several, of which at most one varies; or None."""
    more = len(after[0]) - len(before[0])
    if more < 1:
        return None
    both = list(zip(before, after, strict=True))
    for place in range(len(before[0])):
        end = place + more + 1
        if all(old[:place] == new[:place] and old[place + 1 :] == new[end:] for old, new in both):
            parts = [new[place:end] for new in after]
            sizes = [one[0] if len(set(one)) == 1 else -1 for one in zip(*parts, strict=True)]
            if sizes.count(-1) <= 1:
                return "unflatten", {"dim": place, "sizes": sizes}
    return None
