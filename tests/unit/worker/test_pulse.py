from pathlib import Path

import pytest

from models.settings import Settings
from worker.patience import Patience
from worker.pulse import Pulse


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def test_a_stall_is_told_once_until_the_rank_has_moved(clock: Clock, spool: Path):
    pulse = Pulse(spool, clock=clock)
    told: list[float] = []
    for number in range(100):
        clock.now += 1
        if number == 40:
            spool.write_bytes(b"it goes on")
        if pulse.stalls(10):
            told.append(clock.now)
    assert told == [110.0, 151.0]
    assert pulse.size == len(b"it goes on")


def test_a_rank_that_speaks_does_not_stall(clock: Clock, spool: Path):
    pulse = Pulse(spool, clock=clock)
    for number in range(100):
        clock.now += 1
        if number % 5 == 0:
            spool.write_bytes(b"." * (number + 1))
        assert not pulse.stalls(10)


def test_time_in_which_it_was_made_to_stand_still_does_not_count(clock: Clock, spool: Path):
    pulse = Pulse(spool, clock=clock)
    for _ in range(100):
        clock.now += 1
        pulse.moved()
        assert not pulse.stalls(10)


def test_it_is_not_looked_at_on_every_turn(clock: Clock, spool: Path):
    pulse = Pulse(spool, clock=clock)
    spool.write_bytes(b"much")
    clock.now += 0.01
    pulse.stalls(600)
    assert pulse.size == 0


@pytest.mark.parametrize(("on_stall", "presses"), [("warn", False), ("restart", True)])
def test_what_a_stall_leads_to_is_the_specs_to_say(
    on_stall: str, presses: bool, clock: Clock, spool: Path
):
    spec = {"stall_timeout_s": 10.0, "on_stall": on_stall}
    patience = Patience(spec, Settings(), spent_s=0)
    pulse = Pulse(spool, clock=clock)
    clock.now += 9
    assert patience.listen(pulse, 3) is None
    clock.now += 2
    event = patience.listen(pulse, 3)
    assert event is not None
    assert (event.type, event.payload) == (
        "stalled",
        {"step": 3, "seconds": 11.0, "action": on_stall},
    )
    assert (patience.stalled_s is not None) == presses


def test_the_settings_decide_where_the_spec_is_silent(clock: Clock, spool: Path):
    patience = Patience({}, Settings(stall_timeout_s=7), spent_s=0)
    pulse = Pulse(spool, clock=clock)
    clock.now += 8
    assert patience.listen(pulse, None) is not None
    assert patience.stalled_s is None


def test_the_time_of_earlier_attempts_counts():
    patience = Patience({"timeout_s": 10.0}, Settings(), spent_s=7)
    assert not patience.is_over(2.9)
    assert patience.is_over(3.1)
    assert not Patience({}, Settings(), spent_s=10**6).is_over(10**6)
