"""How much is stored at once: a transaction stays a small part of a lease."""

import pytest

from worker.attempt.store import MAX_RECORDS, BatchSize


def test_a_slow_database_gets_less_at_once_and_a_quick_one_all_of_it_again():
    portion = BatchSize(lease_s=5)
    for took_s, most in ((0.9, 1000), (1.1, 500), (1.1, 250), (0.5, 250), (0.2, 500), (0.2, 1000)):
        portion.took(took_s)
        assert portion.most == most
    portion.took(0.001)
    assert portion.most == MAX_RECORDS


@pytest.mark.parametrize("per_record_s", [0.0001, 0.004, 0.03])
def test_shipments_settle_where_they_take_less_than_a_fifth_of_a_lease(per_record_s: float):
    portion = BatchSize(lease_s=5)
    for _ in range(20):
        portion.took(portion.most * per_record_s)
    assert portion.most * per_record_s <= 1.0
    assert not portion.is_long(portion.most * per_record_s)
