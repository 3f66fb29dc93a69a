"""The benchmark for accelerators runs on one: ``bench/training/accelerator.py``."""

from pathlib import Path

import pytest

from bench.training import accelerator


def test_a_loop_by_hand_computes_what_the_engine_does(tmp_path: Path):
    table = tmp_path / "table"
    place = accelerator.Place(
        "transformer", True, "simulated", str(table), "bfloat16", warm_up=1, steps=1
    )
    accelerator.write(table, place.task.columns(16))
    by_hand, found = (accelerator.block(place, side) for side in (accelerator.HAND, "unwatched"))
    assert found.losses == pytest.approx(by_hand.losses, rel=0.01)
    assert len(found.losses) == 3
    for one in (by_hand, found):
        assert one.seconds > 0
        assert one.peak_bytes
