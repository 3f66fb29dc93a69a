"""The queue of requests: what is computed together, in which order, and what is dropped."""

import threading
import time
from typing import Any, cast

import pytest
import torch

from engine.data.columns.loaded import LoadedField, LoadedSequence
from engine.serving.asked import Asked
from engine.serving.queue import Pending, QueueFull, RequestQueue
from engine.serving.served_models import ServedVersion


class Version:
    """What the queue needs of a version."""

    class inputs:  # noqa: N801 (an attribute)
        @staticmethod
        def depends_on_longest(outputs: tuple[str, ...]) -> bool:
            return "weights" in outputs


ONE, OTHER = cast("ServedVersion", Version()), cast("ServedVersion", Version())


def asked(
    rows: int = 1, longest: int = 0, outputs: tuple[str, ...] = ("fc",), **more: Any
) -> Asked:
    loaded: Any = LoadedField(torch.zeros(rows, 2))
    if longest:
        lengths = torch.full((rows,), longest)
        loaded = LoadedSequence(torch.zeros(rows * longest), torch.arange(rows) * longest, lengths)
    fields = tuple(("value",) for _ in outputs)
    return Asked({"x": loaded}, rows, outputs, more.pop("fields", fields), more.pop("top_k", None))


def pending(given: Asked | None = None, version: ServedVersion = ONE, **more: Any) -> Pending:
    until = time.monotonic() + more.pop("left_s", 60.0)
    return Pending(given or asked(), version, "m", lambda head, body: None, until, **more)


def filled(*requests: Pending, max_rows: int = 8, max_delay_s: float = 0.0) -> RequestQueue:
    queue = RequestQueue(100, max_rows, max_delay_s)
    for request in requests:
        queue.put(request)
    return queue


def taken(queue: RequestQueue) -> list[list[Pending]]:
    found = []
    while batch := queue.take(0.0):
        found.append(batch)
    assert len(queue) == 0
    return found


def test_requests_are_taken_in_the_order_of_their_arrival_up_to_the_rows_of_a_batch():
    requests = [pending(asked(rows=3)) for _ in range(4)]
    assert taken(filled(*requests)) == [requests[:2], requests[2:]]


def test_a_request_with_more_rows_than_a_batch_is_taken_alone():
    small, large = pending(), pending(asked(rows=20))
    assert taken(filled(large, small)) == [[large], [small]]


def test_requests_of_a_higher_priority_come_first():
    low, high, also_high = pending(), pending(priority=1), pending(priority=1)
    assert taken(filled(low, high, also_high)) == [[high, also_high], [low]]


@pytest.mark.parametrize(
    "other",
    [
        pending(version=OTHER, left_s=1e9),  # made long before the test
        pending(asked(outputs=("conv1",)), left_s=1e9),
        pending(asked(fields=(("id",),)), left_s=1e9),
        pending(asked(top_k=3), left_s=1e9),
    ],
)
def test_requests_that_cannot_be_computed_together_are_not(other: Pending):
    first, last = pending(), pending()
    other.arrived = first.arrived + 1e-6
    batches = taken(filled(first, other, last))
    assert batches == [[first, last], [other]]


def test_sequences_are_computed_with_others_of_at_most_twice_their_length():
    requests = {length: pending(asked(longest=length)) for length in (1, 2, 3, 4, 5, 8, 9, 100)}
    batches = taken(filled(*requests.values()))
    lengths = [[int(one.asked.rows["x"].lengths.max()) for one in batch] for batch in batches]  # type: ignore[union-attr]
    assert lengths == [[1], [2], [3, 4], [5, 8], [9], [100]]


def lengths_of(batches: list[list[Pending]]) -> list[list[int]]:
    return [[one.num_steps for one in batch] for batch in batches]


@pytest.mark.parametrize(
    ("fixed_s", "expected"),
    [
        (0.0, [[4], [8], [32]]),
        (0.019, [[4], [8], [32]]),
        (0.021, [[4, 8], [32]]),  # 4 steps of padding cost 0.02 s
        (0.239, [[4, 8], [32]]),
        (0.241, [[4, 8, 32]]),  # 24 steps of padding for each of two rows cost 0.24 s
    ],
)
def test_other_lengths_are_added_while_padding_costs_less_than_a_batch_more(
    fixed_s: float, expected: list[list[int]]
):
    queue = RequestQueue(100, 8, 0.0)
    for rows in (1, 2, 4, 8) * 50:
        queue.took([pending(asked(rows=rows, longest=8))], fixed_s + 0.005 * rows * 8)
    for length in (4, 8, 32):
        queue.put(pending(asked(longest=length)))
    assert lengths_of(taken(queue)) == expected


def test_batches_of_one_size_do_not_tell_what_padding_costs():
    queue = RequestQueue(100, 8, 0.0)
    for _ in range(50):
        queue.took([pending(asked(longest=8))], 1.0)
    for length in (4, 8):
        queue.put(pending(asked(longest=length)))
    assert lengths_of(taken(queue)) == [[4], [8]]


def test_added_requests_are_no_more_rows_than_a_batch():
    queue = RequestQueue(100, 4, 0.0)
    for rows in (1, 2, 4) * 50:
        queue.took([pending(asked(rows=rows, longest=8))], 10.0 + rows)
    for rows, length in ((2, 8), (1, 4), (1, 4), (1, 4)):
        queue.put(pending(asked(rows=rows, longest=length)))
    batches = taken(queue)
    assert [sum(one.asked.num_rows for one in batch) for batch in batches] == [4, 1]


def test_outputs_that_depend_on_the_longest_row_of_a_batch_are_computed_alone():
    requests = [pending(asked(longest=4, outputs=("weights",))) for _ in range(2)]
    assert taken(filled(*requests)) == [[requests[0]], [requests[1]]]


def test_requests_that_nobody_waits_for_are_left_out():
    gone, late, here = pending(), pending(left_s=-1.0), pending()
    gone.is_cancelled = True
    assert taken(filled(gone, late, here)) == [[here]]
    assert taken(filled(gone, late)) == []


def test_a_full_queue_refuses_and_says_how_long_it_takes():
    queue = RequestQueue(2, 8, 0.0)
    for _ in range(200):
        queue.took([pending()], 3.0)
    queue.put(pending())
    queue.put(pending())
    with pytest.raises(QueueFull) as error:
        queue.put(pending())
    assert error.value.size == 2
    assert error.value.wait_s == pytest.approx(6.0, rel=0.01)
    assert queue.is_busy
    queue.take(0.0)
    queue.put(pending())


def test_a_request_of_higher_priority_takes_the_place_of_the_newest_of_the_lowest():
    queue = RequestQueue(3, 8, 0.0)
    low, newer, high = pending(), pending(), pending(priority=1)
    newer.arrived = low.arrived + 1e-6
    for request in (low, newer, high):
        assert queue.put(request) == []
    urgent = pending(priority=2)
    assert queue.put(urgent) == [newer]
    with pytest.raises(QueueFull):
        queue.put(pending())
    assert taken(queue) == [[urgent], [high], [low]]


def test_the_place_of_a_cancelled_request_is_free_at_once():
    queue = RequestQueue(2, 8, 0.0)
    gone, here, more = pending(), pending(), pending()
    queue.put(gone)
    queue.put(here)
    queue.cancel(gone)
    queue.cancel(gone)
    assert len(queue) == 1
    queue.put(more)
    assert taken(queue) == [[here, more]]
    queue.cancel(here)  # while it is computed
    assert len(queue) == 0


def test_cancelled_requests_do_not_pile_up_behind_those_of_higher_priority():
    queue = RequestQueue(2, 8, 0.0)
    queue.put(pending(priority=1))
    for _ in range(1000):
        request = pending()
        queue.put(request)
        queue.cancel(request)
    kept = sum(len(waiting) for waiting in queue._groups.values())  # pyright: ignore[reportPrivateUsage]
    assert kept <= 102
    assert [len(batch) for batch in taken(queue)] == [1]


def test_requests_with_more_bytes_than_may_wait_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.serving.queue.MAX_BYTES", 100)
    queue = RequestQueue(100, 64, 0.0)
    queue.put(pending(asked(rows=50)))  # 400 bytes: one is always taken
    with pytest.raises(QueueFull):
        queue.put(pending(asked(rows=1)))
    queue.take(0.0)
    queue.put(pending(asked(rows=12)))
    with pytest.raises(QueueFull):
        queue.put(pending(asked(rows=1)))


def test_a_batch_that_is_not_full_waits_for_more_requests_until_its_delay_is_over():
    queue = filled(pending(), max_rows=3, max_delay_s=30.0)
    found: list[list[Pending]] = []
    thread = threading.Thread(target=lambda: found.append(queue.take(0.0)))
    thread.start()
    queue.put(pending())
    assert thread.is_alive()
    queue.put(pending())  # now it is full
    thread.join(10)
    assert [len(batch) for batch in found] == [3]
    began = time.monotonic()
    assert len(filled(pending(), max_rows=3, max_delay_s=0.05).take(0.0)) == 1
    assert time.monotonic() - began < 10


def test_a_request_that_comes_wakes_who_waits():
    queue, found = RequestQueue(10, 8, 0.0), []
    thread = threading.Thread(target=lambda: found.append(queue.take(60.0)))
    thread.start()
    request = pending()
    queue.put(request)
    thread.join(10)
    assert found == [[request]]
