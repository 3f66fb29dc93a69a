from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.access.quotas import QuotaLeft
from models.jobs.needs import Need
from worker.dispatch import Choice, Slot, Waiting, choose


def cores(worker: str, count: int, busy: int = 0) -> list[Slot]:
    return [Slot(worker, f"cpu:{n}", "cpu", n, free=n >= busy) for n in range(count)]


def cuda(worker: str, number: int, *, free: bool = True, healthy: bool = True) -> Slot:
    return Slot(worker, f"cuda:{number}", "cuda", number, healthy, free)


def serve(queue: list[Waiting], slots: list[Slot]) -> list[Choice]:
    return choose(queue, slots, starvation_s=60)


def with_cores(choice: Choice, *ids: str) -> Choice:
    """The choice of CUDA devices, with cores beside them."""
    return replace(choice, cores=ids)


def one(need: Need, slots: list[Slot]) -> Choice | None:
    found = serve([Waiting("j", need)], slots)
    return found[0] if found else None


def flexible(job: str, worker: str, *devices: str) -> Choice:
    return Choice(job, worker, devices, is_flexible=True)


def test_a_cpu_job_without_threads_starts_with_one_core():
    assert one(Need("cpu"), cores("w", 8)) == flexible("j", "w", "cpu:0")
    assert one(Need("cpu"), cores("w", 1)) == flexible("j", "w", "cpu:0")


def test_a_core_that_its_job_can_do_without_is_given_but_after_free_ones():
    slots = [
        Slot("w", "cpu:0", "cpu", 0, free=False),
        Slot("w", "cpu:1", "cpu", 1, free=False, kept=1),
        Slot("w", "cpu:2", "cpu", 2, free=False, kept=2),
        Slot("w", "cpu:3", "cpu", 3, free=True),
    ]
    assert one(Need("cpu", threads=1), slots) == Choice("j", "w", ("cpu:3",))
    assert one(Need("cpu", threads=2), slots) == Choice("j", "w", ("cpu:3", "cpu:2"))
    assert one(Need("cpu", threads=3), slots) == Choice("j", "w", ("cpu:3", "cpu:2", "cpu:1"))
    assert one(Need("cpu", threads=4), slots) is None
    assert one(brief("cpu"), slots[:3]) == Choice("j", "w", ("cpu:2",)), "before it shares one"


def test_jobs_prefer_a_worker_with_free_cores_to_one_whose_jobs_give_some_up():
    slots = [Slot("a", f"cpu:{n}", "cpu", n, free=False, kept=n) for n in range(8)]
    slots += cores("b", 2, busy=1)
    assert one(Need("cpu"), slots) == flexible("j", "b", "cpu:1")


def test_a_job_gets_all_its_cores_on_one_worker_or_none():
    slots = cores("a", 4, busy=2) + cores("b", 4, busy=1)
    assert one(Need("cpu", threads=3), slots) == Choice("j", "b", ("cpu:1", "cpu:2", "cpu:3"))
    assert one(Need("cpu", threads=4), slots) is None


def test_auto_takes_a_free_cuda_device():
    found = one(Need(), [*cores("w", 4), cuda("w", 0)])
    assert found == with_cores(Choice("j", "w", ("cuda:0",)), "cpu:0")


def test_auto_waits_for_a_healthy_cuda_device_that_is_busy():
    assert one(Need(), [*cores("w", 4), cuda("w", 0, free=False)]) is None


def test_auto_takes_cores_where_every_cuda_device_is_unhealthy():
    chosen = one(Need(), [*cores("w", 4), cuda("w", 0, healthy=False)])
    assert chosen == flexible("j", "w", "cpu:0")


def test_a_device_has_the_memory_that_a_job_asks_for():
    small, large = cuda("w", 0), replace(cuda("w", 1), memory_bytes=80)
    small = replace(small, memory_bytes=40)
    needs = [Need("cuda", min_memory_bytes=size) for size in (40, 41, 80, 81)]
    given_out = [one(need, [small, large, *cores("w", 2)]) for need in needs]
    assert [choice and choice.devices for choice in given_out] == [
        ("cuda:0",),
        ("cuda:1",),
        ("cuda:1",),
        None,
    ]
    two = Need("cuda", processes=2, min_memory_bytes=41)
    assert one(two, [small, large]) is None
    unknown = replace(large, memory_bytes=None)
    assert one(Need("cuda", min_memory_bytes=1), [unknown]) is None
    assert one(Need("cuda"), [unknown]) is not None


def test_auto_takes_cores_where_no_cuda_device_has_the_memory():
    hosts = [replace(core, memory_bytes=200) for core in cores("w", 2)]
    device = replace(cuda("w", 0, free=False), memory_bytes=80)
    chosen = one(Need(min_memory_bytes=100), [device, *hosts])
    assert chosen == flexible("j", "w", "cpu:0")
    assert one(Need(min_memory_bytes=50), [device, *hosts]) is None, "it waits for the device"
    assert one(Need(min_memory_bytes=201), [device, *hosts]) is None


def test_a_brief_job_shares_no_core_of_a_host_with_too_little_memory():
    busy = [replace(core, memory_bytes=10) for core in cores("w", 1, busy=1)]
    for size, expected in ((10, ["j"]), (11, [])):
        waiting = Waiting("j", Need(brief=True, min_memory_bytes=size))
        found = choose([waiting], busy, starvation_s=60, shares={"w": 1})
        assert [choice.job for choice in found] == expected


def test_a_number_means_exactly_that_device():
    slots = [cuda("w", 0), cuda("w", 1)]
    assert one(Need("cuda", ids=(1,)), slots) == Choice("j", "w", ("cuda:1",))
    assert one(Need("cuda", ids=(2,)), slots) is None


def test_a_job_gets_all_the_devices_that_it_lists_or_none():
    slots = [cuda("a", 0), cuda("a", 1), cuda("b", 1), cuda("b", 2, free=False), cuda("b", 3)]
    need = Need("cuda", ids=(3, 1), processes=2)
    assert one(need, slots) == Choice("j", "b", ("cuda:1", "cuda:3"))
    assert one(Need("cuda", ids=(2, 1), processes=2), slots) is None
    assert one(Need("cuda", processes=3), slots) is None
    assert one(Need("cuda", processes=2), slots) is not None


def test_any_device_means_cpu_cores_if_no_worker_has_a_gpu_for_each_process():
    slots = [*cores("w", 4), cuda("w", 0), cuda("x", 0), cuda("x", 1)]
    assert one(Need(processes=2), slots) == Choice("j", "x", ("cuda:0", "cuda:1"))
    found = one(Need(processes=2), slots[:5])
    assert found is not None
    assert found.devices == ("cpu:0", "cpu:1")
    alone = with_cores(Choice("j", "w", ("cuda:0",)), "cpu:0")
    assert one(Need(processes=1), slots[:5]) == alone


def test_a_job_of_several_processes_gets_cores_for_each():
    assert one(Need("cpu", threads=2, processes=3), cores("w", 6)) is not None
    assert one(Need("cpu", threads=2, processes=3), cores("w", 5)) is None
    assert one(Need("cpu", processes=3), cores("w", 16)) == flexible(
        "j", "w", "cpu:0", "cpu:1", "cpu:2"
    )
    assert one(Need("cpu", processes=3), cores("w", 2)) is None


def test_one_process_gets_all_the_devices_that_its_layers_are_on():
    need = Need.of({"type": "cuda", "ids": [3, 1]})
    assert need.processes == 1
    slots = [cuda("a", 1), cuda("b", 1), cuda("b", 2), cuda("b", 3)]
    assert one(need, slots) == Choice("j", "b", ("cuda:1", "cuda:3"))
    two = Need.of({"type": "cuda", "count": 2})
    assert one(two, slots[:2]) is None
    assert one(two, slots) == Choice("j", "b", ("cuda:1", "cuda:2"))


def test_a_job_for_one_worker_runs_on_no_other():
    slots = cores("a", 4) + cores("b", 4, busy=4)
    assert one(Need("cpu", threads=1, worker="b"), slots) is None


def test_jobs_go_to_the_emptiest_worker():
    slots = cores("a", 4, busy=2) + cores("b", 4, busy=1)
    chosen = one(Need("cpu", threads=1), slots)
    assert chosen is not None
    assert chosen.worker == "b"


def test_small_jobs_pass_a_large_one_that_does_not_fit():
    queue = [Waiting("large", Need("cpu", threads=4)), Waiting("small", Need("cpu", threads=1))]
    assert [choice.job for choice in serve(queue, cores("w", 4, busy=1))] == ["small"]


def test_a_large_job_that_has_waited_long_keeps_devices_from_those_behind_it():
    queue = [
        Waiting("large", Need("cpu", threads=4), waited_s=61),
        Waiting("small", Need("cpu", threads=1)),
    ]
    assert serve(queue, cores("w", 4, busy=1)) == []
    assert serve(queue, cores("w", 4))[0].job == "large"


def test_a_job_that_no_worker_could_ever_run_keeps_nothing():
    queue = [
        Waiting("impossible", Need("cpu", threads=9), waited_s=1e6),
        Waiting("small", Need("cpu", threads=1)),
    ]
    assert [choice.job for choice in serve(queue, cores("w", 4))] == ["small"]


needs = st.one_of(
    st.builds(
        Need,
        st.just("cpu"),
        st.none(),
        st.none() | st.integers(1, 6),
        st.sampled_from([None, "a", "b"]),
    ),
    st.builds(
        Need,
        st.just("cuda"),
        st.none() | st.tuples(st.integers(0, 3)),
        st.none() | st.integers(1, 3),
        st.none(),
        data_workers=st.integers(0, 2),
    ),
    st.just(Need()),
    st.builds(
        Need,
        st.sampled_from(["auto", "cpu", "cuda"]),
        min_memory_bytes=st.sampled_from([1, 40, 80]),
    ),
)
slots_of = st.lists(
    st.builds(
        lambda worker, kind, number, healthy, free, memory: Slot(
            worker, f"{kind}:{number}", kind, number, healthy, free, memory
        ),
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(["cpu", "cuda"]),
        st.integers(0, 5),
        st.booleans(),
        st.booleans(),
        st.sampled_from([None, 20, 40, 80]),
    ),
    max_size=24,
    unique_by=lambda slot: (slot.worker, slot.id),
)
queues = st.lists(st.tuples(needs, st.sampled_from([0.0, 100.0])), max_size=12).map(
    lambda found: [Waiting(f"j{n}", need, waited) for n, (need, waited) in enumerate(found)]
)


@given(queues, slots_of)
def test_a_device_is_given_once_and_only_when_it_is_free_and_healthy(
    queue: list[Waiting], slots: list[Slot]
):
    chosen = serve(queue, slots)
    given_out = [(choice.worker, device) for choice in chosen for device in choice.held]
    usable = {(slot.worker, slot.id) for slot in slots if slot.free and slot.healthy}
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= usable
    assert len({choice.job for choice in chosen}) == len(chosen)


@given(queues, slots_of)
def test_every_job_gets_what_it_asked_for(queue: list[Waiting], slots: list[Slot]):
    needs_of = {waiting.job: waiting.need for waiting in queue}
    by_id = {(slot.worker, slot.id): slot for slot in slots}
    for choice in serve(queue, slots):
        need = needs_of[choice.job]
        devices = [by_id[choice.worker, device] for device in choice.devices]
        assert need.worker in (None, choice.worker)
        assert len({device.kind for device in devices}) == 1
        assert need.kind in ("auto", devices[0].kind)
        if devices[0].kind == "cuda":
            mine = [slot for slot in slots if (slot.worker, slot.kind) == (choice.worker, "cpu")]
            wanted = min(1 + need.data_workers, sum(slot.healthy for slot in mine))
            assert len(choice.cores) == (need.threads or wanted)
            assert {by_id[choice.worker, core].kind for core in choice.cores} <= {"cpu"}
        else:
            assert len(devices) == need.threads or need.threads is None
            assert not choice.cores
        assert need.fits(devices[0].number, devices[0].memory_bytes)


@given(queues, slots_of)
def test_earlier_jobs_are_dispatched_as_if_no_later_one_waited(
    queue: list[Waiting], slots: list[Slot]
):
    whole = serve(queue, slots)
    for length in range(len(queue)):
        known = {waiting.job for waiting in queue[:length]}
        assert serve(queue[:length], slots) == [one for one in whole if one.job in known]


@given(st.integers(2, 6), st.lists(st.integers(1, 2), min_size=20, max_size=40))
def test_a_stream_of_small_jobs_does_not_starve_a_large_one(size: int, small: list[int]):
    """Each round one running job ends and a new small one comes; the large one is old enough."""
    slots = cores("w", size)
    running = [Choice(f"r{n}", "w", (f"cpu:{n}",)) for n in range(size)]
    behind: list[Waiting] = []
    for number, threads in enumerate(small):
        running = running[1:]
        behind.append(Waiting(f"s{number}", Need("cpu", threads=threads)))
        taken = {device for choice in running for device in choice.devices}
        now = [Slot(s.worker, s.id, s.kind, s.number, free=s.id not in taken) for s in slots]
        queue = [Waiting("large", Need("cpu", threads=size), waited_s=100), *behind]
        chosen = serve(queue, now)
        if any(choice.job == "large" for choice in chosen):
            assert number < size
            return
        running += chosen
    raise AssertionError("the large job never ran")


def test_an_owner_gets_no_more_than_their_room_and_keeps_nothing_from_others():
    queue = [
        *(Waiting(f"a{n}", Need("cpu", threads=1), waited_s=100, owner="ada") for n in range(5)),
        Waiting("b", Need("cpu", threads=2), owner="bob"),
    ]
    remaining = {"ada": QuotaLeft(jobs=2, devices=None, most_devices=None)}
    found = choose(queue, cores("w", 4), starvation_s=60, remaining=remaining)
    assert [choice.job for choice in found] == ["a0", "a1", "b"]
    assert remaining["ada"].jobs == 2, "what was given in is not changed"


def test_a_job_that_wants_more_devices_than_its_owner_may_have_waits():
    queue = [
        Waiting("a", Need("cpu", threads=3), owner="ada"),
        Waiting("b", Need("cpu", threads=3)),
    ]
    remaining = {"ada": QuotaLeft(jobs=None, devices=2, most_devices=2)}
    (choice,) = choose(queue, cores("w", 4), starvation_s=60, remaining=remaining)
    assert choice.job == "b"


@given(queues, slots_of, st.integers(0, 4), st.integers(0, 6))
def test_no_owner_ever_gets_more_than_their_room(
    queue: list[Waiting], slots: list[Slot], num_jobs: int, num_devices: int
):
    owned = [replace(waiting, owner="ada") for waiting in queue]
    remaining = {"ada": QuotaLeft(num_jobs, num_devices, num_devices)}
    found = choose(owned, slots, starvation_s=60, remaining=remaining)
    assert len(found) <= num_jobs
    counted = [max(len(choice.devices), len(choice.cores)) for choice in found]
    assert sum(counted) <= num_devices


def brief(kind: str = "auto", **more: Any) -> Need:
    return Need(kind, brief=True, **more)


def test_a_brief_job_takes_cores_while_every_cuda_device_is_busy():
    slots = [*cores("w", 4), cuda("w", 0, free=False)]
    assert one(brief(), slots) == Choice("j", "w", ("cpu:0", "cpu:1"))
    assert one(brief(), [*slots, cuda("v", 0)]) == Choice("j", "v", ("cuda:0",))


def test_a_brief_job_takes_as_many_cores_as_are_free():
    assert one(brief(), cores("w", 8, busy=7)) == Choice("j", "w", ("cpu:7",))
    assert one(brief("cpu", threads=2), cores("w", 8, busy=7)) is None


def test_where_no_core_is_free_a_brief_job_shares_one_and_no_other_job_does():
    queue = [
        Waiting("train", Need("cpu", threads=1)),
        Waiting("wide", brief("cpu", threads=2)),
        Waiting("card", brief("cuda")),
        *(Waiting(f"i{n}", brief("cpu")) for n in range(3)),
    ]
    slots = cores("a", 2, busy=2) + cores("b", 2, busy=2)
    found = choose(queue, slots, starvation_s=60, shares={"a": 1, "b": 1, "gone": 5})
    assert found == [
        Choice("i0", "a", ("cpu:0",), shared=True),
        Choice("i1", "b", ("cpu:0",), shared=True),
    ]


def test_no_more_jobs_are_placed_than_are_asked_for():
    queue = [Waiting(f"j{n}", Need("cpu", threads=1)) for n in range(5)]
    found = choose(queue, cores("w", 5), starvation_s=60, most=2)
    assert [choice.job for choice in found] == ["j0", "j1"]


def free_ids(slots: list[Slot], free: set[tuple[str, str]]) -> list[str]:
    ordered = sorted(slots, key=lambda slot: slot.number)
    return [slot.id for slot in ordered if (slot.worker, slot.id) in free]


def plainly(queue: list[Waiting], slots: list[Slot]) -> list[Choice]:
    """As `choose`, without its shortcuts: every job looks at every device."""
    free = {(slot.worker, slot.id) for slot in slots if slot.free and slot.healthy}
    chosen: list[Choice] = []
    for waiting in queue:
        need = waiting.need
        able = [slot for slot in slots if slot.healthy and need.worker in (None, slot.worker)]
        able = [slot for slot in able if need.fits(slot.number, slot.memory_bytes)]
        has_cuda = any(slot.kind == "cuda" for slot in able)
        kind = need.kind if need.kind != "auto" else "cuda" if has_cuda else "cpu"
        places: list[tuple[int, int, str, list[str], list[str]]] = []
        for worker in sorted({slot.worker for slot in able if slot.kind == kind}):
            mine = [slot for slot in able if slot.worker == worker and slot.kind == kind]
            count = (need.threads or 1) if kind == "cpu" else 1
            ids = free_ids(mine, free)
            host = [slot for slot in slots if (slot.worker, slot.kind) == (worker, "cpu")]
            host = [slot for slot in host if slot.healthy] if kind == "cuda" else []
            wanted = need.threads or min(1 + need.data_workers, len(host))
            wanted = wanted if kind == "cuda" else 0
            others = free_ids(host, free)
            missing = max(0, count - len(ids)) + max(0, wanted - len(others))
            if mine and len(mine) >= count and len(host) >= wanted:
                places.append((missing, -len(ids), worker, ids[:count], others[:wanted]))
        ready = [place[1:] for place in places if place[0] == 0]
        if ready:
            _, worker, taken, beside = min(ready)
            is_flexible = kind == "cpu" and need.threads is None
            choice = Choice(waiting.job, worker, tuple(taken), is_flexible=is_flexible)
            chosen.append(with_cores(choice, *beside))
        elif places and waiting.waited_s >= 60:
            _, _, worker, taken, beside = min(places, key=lambda place: (place[0], place[2]))
        else:
            continue
        free -= {(worker, id_) for id_ in [*taken, *(beside if taken else [])]}
    return chosen


@given(queues, slots_of)
def test_what_is_skipped_as_hopeless_would_have_got_nothing(
    queue: list[Waiting], slots: list[Slot]
):
    assert serve(queue, slots) == plainly(queue, slots)


def test_a_cuda_job_gets_a_core_for_each_process_and_each_of_its_data_workers():
    slots = [*cores("w", 8), *(cuda("w", n) for n in range(4))]
    for need, expected in (
        (Need("cuda"), 1),
        (Need("cuda", data_workers=3), 4),
        (Need("cuda", processes=2), 2),
        (Need("cuda", processes=2, data_workers=2), 6),
        (Need("cuda", processes=4, data_workers=2), 8),  # all that the worker has
        (Need("cuda", processes=2, threads=3, data_workers=9), 6),
        (Need("cuda", num_devices=4), 1),
        (Need("auto", data_workers=1), 2),
        (brief("cuda"), 1),
        (brief("cuda", threads=2), 2),
    ):
        choice = one(need, slots)
        assert choice is not None
        assert choice.cores == tuple(f"cpu:{n}" for n in range(expected)), need
    assert one(Need("cuda", threads=9), slots) is None
    assert one(Need("cuda", threads=8), slots) is not None


def test_a_cuda_job_waits_for_cores_and_takes_those_that_others_can_do_without():
    cards = [cuda("w", 0), cuda("w", 1)]
    assert one(Need("cuda"), [*cores("w", 2, busy=2), *cards]) is None
    surplus = [Slot("w", "cpu:0", "cpu", 0, free=False)]
    surplus += [Slot("w", f"cpu:{n}", "cpu", n, free=False, kept=n) for n in (1, 2)]
    found = one(Need("cuda"), [*surplus, *cards])
    assert found == with_cores(Choice("j", "w", ("cuda:0",)), "cpu:2")
    assert one(Need("cuda", data_workers=2), [*surplus, *cards]) is None
    elsewhere = [*cores("w", 2, busy=2), *cards, cuda("v", 5), *cores("v", 1)]
    found = one(Need("cuda"), elsewhere)
    assert found == with_cores(Choice("j", "v", ("cuda:5",)), "cpu:0"), "where both are free"


def test_a_brief_job_takes_a_free_cuda_device_where_no_core_is_free():
    slots = [*cores("w", 2, busy=2), cuda("w", 0)]
    assert one(brief("cuda"), slots) == Choice("j", "w", ("cuda:0",))
    assert one(brief("auto"), slots) == Choice("j", "w", ("cuda:0",))
    assert one(brief("cuda", threads=1), slots) is None


def test_a_cuda_job_that_has_waited_long_keeps_cores_once_a_device_is_free():
    queue = [
        Waiting("card", Need("cuda", data_workers=1), waited_s=61),
        Waiting("small", Need("cpu", threads=1)),
    ]
    slots = [*cores("w", 3, busy=2), cuda("w", 0)]
    assert serve(queue, slots) == []
    busy = [*cores("w", 3, busy=2), cuda("w", 0, free=False)]
    assert [choice.job for choice in serve(queue, busy)] == ["small"], "no core waits for a device"


def test_a_core_for_each_device_belongs_to_it_in_a_quota_and_others_count():
    slots = [*cores("w", 8), *(cuda("w", n) for n in range(4))]

    def placed(need: Need, most: int, left: int) -> int | None:
        remaining = {"ada": QuotaLeft(jobs=None, devices=left, most_devices=most)}
        found = choose(
            [Waiting("a", need, owner="ada")], slots, starvation_s=60, remaining=remaining
        )
        return len(found[0].cores) if found else None

    assert placed(Need("cuda"), 1, 1) == 1
    assert placed(Need("cuda", processes=2), 2, 2) == 2
    assert placed(Need("cuda", data_workers=3), 8, 4) == 4
    assert placed(Need("cuda", data_workers=3), 8, 3) is None
    assert placed(Need("cuda", data_workers=3), 2, 2) == 2, "no more than it may ever have"
    assert placed(Need("cuda", threads=3), 2, 2) is None


@pytest.mark.parametrize(
    ("need", "least", "field"),
    [
        (Need("cpu"), 1, "/devices"),
        (Need("cpu", threads=3), 3, "/devices/threads"),
        (Need("cpu", threads=3, processes=2), 6, "/devices/threads"),
        (Need("cpu", threads=1, processes=2), 2, "/parallel/processes"),
        (Need("cuda", processes=4), 4, "/parallel/processes"),
        (Need("cuda", ids=(2, 3), num_devices=2), 2, "/devices/ids"),
        (Need("cuda", num_devices=3), 3, "/devices/count"),
        (Need("cuda", num_devices=3, threads=4), 4, "/devices/threads"),
        (Need("cuda", processes=2, data_workers=3), 2, "/parallel/processes"),
        (Need("auto", processes=2, num_devices=2), 2, "/devices/count"),
    ],
    ids=str,
)
def test_the_fewest_devices_that_a_quota_must_have(need, least, field):
    assert (need.least, need.field) == (least, field)
