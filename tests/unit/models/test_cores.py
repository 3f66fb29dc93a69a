"""How the cores of a worker are divided among jobs that name no number of threads."""

from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from models.fleet.cores import Core, FlexibleJob, divide, redistribute, surplus


def job(name: str, *cores: str, processes: int = 1, owner: str = "ada") -> FlexibleJob:
    return FlexibleJob(name, 1, owner, "w", processes, cores)


def shares(num_cores: int, *jobs: FlexibleJob, **room: int) -> list[int]:
    return [*divide(jobs, {"w": num_cores}, room).values()]


def test_a_job_alone_has_all_cores_and_two_have_half_of_them():
    assert shares(2, job("a")) == [2]
    assert shares(2, job("a"), job("b")) == [1, 1]
    assert shares(8, job("a"), job("b")) == [4, 4]


def test_the_older_job_has_the_odd_core():
    assert shares(7, job("a"), job("b")) == [4, 3]
    assert shares(5, job("a"), job("b"), job("c")) == [2, 2, 1]


def test_each_process_of_a_job_has_as_many_cores():
    assert shares(7, job("a", processes=2)) == [6]
    assert shares(8, job("a", processes=2), job("b")) == [4, 4]
    assert shares(3, job("a", processes=2), job("b")) == [2, 1]
    assert shares(9, job("a", processes=3), job("b", processes=2)) == [3, 6]


def test_an_owner_has_no_more_than_the_quota():
    assert shares(8, job("a"), job("b"), ada=3) == [2, 1]
    assert shares(8, job("a"), job("b", owner="bob"), ada=1) == [1, 7]
    assert shares(8, job("a"), ada=0) == [1], "what it runs on is not taken away"


def test_what_a_job_can_do_without_begins_with_its_last_core():
    assert surplus([job("a", "cpu:0", "cpu:3", "cpu:5")]) == {("w", "cpu:3"): 1, ("w", "cpu:5"): 2}
    assert surplus([job("a", "cpu:0", "cpu:3", processes=2)]) == {}


def test_a_job_that_starts_takes_cores_and_the_rest_is_divided():
    running = job("a", "cpu:0", "cpu:1", "cpu:2", "cpu:3")
    usable = {("w", f"cpu:{n}") for n in range(4)}
    found = redistribute([running], usable, {}, new=[job("b", "cpu:3")], taken={("w", "cpu:3")})
    assert found.released == ((("w", "cpu:3"), "a"), (("w", "cpu:2"), "a"))
    assert [(core, to.job) for core, to in found.granted] == [(("w", "cpu:2"), "b")]


def test_an_unhealthy_core_is_given_up_first_and_to_nobody():
    running = [job("a", "cpu:0", "cpu:2", "cpu:1"), job("b", "cpu:3")]
    found = redistribute(running, {("w", f"cpu:{n}") for n in (0, 2, 3)}, {})
    assert found.released == ((("w", "cpu:1"), "a"),)
    assert found.granted == ()


parts = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 4), st.sampled_from(["ada", "bob"])), max_size=6
)


@given(parts, st.integers(0, 6), st.integers(0, 20), st.integers(0, 5))
def test_no_core_is_anybodys_twice_and_each_job_keeps_what_it_needs(
    wanted: list[tuple[int, int, str]], num_free: int, limit: int, num_fixed: int
):
    jobs: list[FlexibleJob] = []
    number = num_fixed  # the first ones belong to jobs that name their threads
    for place, (processes, more, owner) in enumerate(wanted):
        count = processes + more
        ids = tuple(f"cpu:{n}" for n in range(number, number + count))
        jobs.append(job(f"j{place}", *ids, processes=processes, owner=owner))
        number += count
    usable: set[Core] = {("w", f"cpu:{n}") for n in range(num_fixed, number + num_free)}
    moves = redistribute(jobs, usable, {"ada": limit})

    held = {one.job: set(one.cores) for one in jobs}
    for (_, core), name in moves.released:
        held[name].remove(core)
    for (_, core), to in moves.granted:
        held[to.job].add(core)
    all_held = [core for cores in held.values() for core in cores]
    assert len(all_held) == len(set(all_held))
    assert {("w", core) for core in all_held} <= usable, "no core of a job that names its threads"

    by_owner: Counter[str] = Counter()
    least: dict[str, int] = defaultdict(int)
    for one in jobs:
        assert len(held[one.job]) >= one.processes
        assert len(held[one.job]) % one.processes == 0
        by_owner[one.owner] += len(held[one.job])
        least[one.owner] += one.processes
    assert by_owner["ada"] <= max(limit, least["ada"])

    again = [
        FlexibleJob(one.job, 1, one.owner, "w", one.processes, tuple(sorted(held[one.job], key=at)))
        for one in jobs
    ]
    assert not redistribute(again, usable, {"ada": limit}), "then nothing moves any more"


def at(core: str) -> int:
    return int(core.removeprefix("cpu:"))
