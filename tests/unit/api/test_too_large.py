"""A job that no device can hold is refused; what a checkpoint is written from is host memory."""

import pytest

from api.submission.submission import _refuse_too_large
from glasshouse.errors import InvalidSpec

PLAN = {"memory": {"total_bytes": 10 * 2**30, "checkpoint_bytes": 4 * 2**30}}


def device(kind: str, gib: int) -> dict[str, object]:
    return {"kind": kind, "memory_bytes": gib * 2**30}


def test_the_copy_for_a_checkpoint_counts_where_it_is():
    _refuse_too_large(PLAN, [device("cpu", 10)])
    _refuse_too_large(PLAN, [device("cuda", 6)])
    _refuse_too_large(PLAN, [device("cpu", 1), device("cuda", 6)])
    with pytest.raises(InvalidSpec, match=r"about 10\.0 GiB, and .* has 9\.0 GiB"):
        _refuse_too_large(PLAN, [device("cpu", 9)])
    with pytest.raises(InvalidSpec, match=r"about 6\.0 GiB, and .* has 5\.0 GiB"):
        _refuse_too_large(PLAN, [device("cuda", 5)])
