"""Cuts of a list of layers into stages, against all cuts that there are."""

from itertools import combinations

import numpy as np
import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from engine.plan.cuts import LayerSizes, best_cuts
from engine.plan.pipeline import num_held
from glasshouse.spec import TrainJob
from tests.unit.engine.pipelines import parsed


@pytest.mark.parametrize("seed", range(60))
def test_no_other_cuts_have_a_smaller_largest_stage(seed: int):
    generator = np.random.default_rng(seed)
    num_layers = int(generator.integers(3, 9))
    count = int(generator.integers(2, num_layers + 1))
    drawn = generator.integers(0, generator.choice([3, 1000]), (3, num_layers))
    fixed, made, received = drawn.tolist()
    sizes = LayerSizes(fixed, made, received)
    held = generator.integers(1, 5, count).tolist()
    places = range(1, num_layers)
    needed = int(generator.integers(count - 1, num_layers))
    allowed = sorted(generator.choice(places, needed, replace=False).tolist())

    def by_hand(cuts: tuple[int, ...]) -> int:
        stages = zip([0, *cuts], [*cuts, num_layers], held, strict=True)
        return max(
            sum(fixed[begin:end]) + number * (sum(made[begin:end]) + received[begin])
            for begin, end, number in stages
        )

    found = best_cuts(sizes, allowed, held)
    assert set(found) <= set(allowed)
    assert found == sorted(set(found))
    assert len(found) == count - 1
    best = min(by_hand(cuts) for cuts in combinations(allowed, count - 1))
    assert by_hand(tuple(found)) == best


def test_equal_cuts_leave_stages_of_about_one_size():
    sizes = LayerSizes([1000, *[10] * 30], [0] * 31, [0] * 31)  # the first layer decides the size
    assert best_cuts(sizes, range(1, 31), [1] * 4) == [1, 11, 21]


def test_thousands_of_layers_are_cut():
    sizes = LayerSizes([7] * 10_000, [1] * 10_000, [3] * 10_000)
    cuts = best_cuts(sizes, range(1, 10_000), [8 - stage for stage in range(8)])
    assert len(cuts) == 7
    assert cuts[0] < 10_000 - cuts[-1]  # the first stage holds the activations of most batches


def test_a_stage_holds_as_many_micro_batches_as_in_the_order_of_torch():
    for schedule, size, own, number in [
        ("gpipe", 3, 1, 4),
        ("1f1b", 4, 1, 8),
        ("1f1b", 4, 1, 4),
        ("interleaved", 2, 2, 8),
        ("interleaved", 4, 2, 8),
        ("interleaved", 4, 2, 4),
        ("interleaved", 4, 3, 10),
        ("interleaved", 3, 2, 5),
        ("interleaved", 2, 4, 2),
    ]:
        job = parsed_with(schedule, size, own, number)
        for process in range(size):
            most = held_by_torch(schedule, size, own, number, process)
            for stage in range(process, size * own, size):
                found = num_held(job, stage, size * own)
                assert found == most[stage], (schedule, size, own, number, stage)


def parsed_with(schedule: str, size: int, own: int, number: int) -> TrainJob:
    layers = [{"name": f"l{n}", "type": "Linear", "stage": n} for n in range(size * own)]
    parallel = {"processes": size, "schedule": schedule, "micro_batches": number}
    return parsed(layers, parallel, batch_size=number)


def held_by_torch(schedule: str, size: int, own: int, number: int, process: int) -> dict[int, int]:
    """The most micro-batches between their forward and backward pass, by stage."""
    kinds = {
        "gpipe": torch_schedules.ScheduleGPipe,
        "1f1b": torch_schedules.Schedule1F1B,
        "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    }
    # Without stages, which need processes: the order depends on these numbers only.
    order = kinds[schedule].__new__(kinds[schedule])
    order._n_microbatches, order._num_stages, order.pp_group_size = number, size * own, size
    if schedule == "interleaved":
        order.n_local_stages = own
        order.microbatches_per_round = number // max(1, number // size)
        actions = order._calculate_single_rank_operations(process)
    else:
        actions = order._get_pipeline_order()[process]
    now, most = dict.fromkeys(range(size * own), 0), dict.fromkeys(range(size * own), 0)
    for action in actions:
        if action is None or action.computation_type.name not in ("FORWARD", "FULL_BACKWARD"):
            continue
        now[action.stage_index] += 1 if action.computation_type.name == "FORWARD" else -1
        most[action.stage_index] = max(most[action.stage_index], now[action.stage_index])
    return most
