"""The queue, the workers and the devices, in a service of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from redis import Redis

from api.schemas import inspection
from models.database import Database
from models.fleet import workers
from models.fleet.workers import FoundDevice
from models.jobs import jobs
from models.settings import Settings
from tests.integration.inspection import services
from tests.integration.inspection.services import Api, Writer, checked, problem
from tests.integration.store.factories import make_job, make_worker, start
from worker.dispatch import dispatch


def test_the_queue_says_why_a_job_waits(
    sqlite: Database, redis: Redis, serve: Callable[..., Api]
) -> None:
    def submit(owner: str, **devices: Any) -> str:
        spec = {"kind": "train", "devices": {"type": "auto"} | devices}
        with sqlite.write() as tx:
            return jobs.add(tx, owner=owner, spec=spec, resolved=spec, plan={}).id

    first = submit("ada")
    api = serve(sqlite)
    with (
        services.client(api.url, services.make_key(sqlite, "ada")[1]) as ada,
        services.client(api.url, services.make_key(sqlite, "root", "admin")[1]) as root,
    ):
        (entry,) = checked(ada.get("/queue"), inspection.QueuedJobList)["data"]
        assert (entry["job"], entry["reason"]) == (first, "no worker")
        writer = Writer(sqlite, redis).begin()
        assert ada.get("/queue").json()["data"][0]["reason"] == "no free device"
        writer.finish()
        submit("eve")
        submit("ada", type="cuda")
        submit("ada", worker="w9")
        submit("ada")
        reasons = [(row["position"], row["reason"]) for row in ada.get("/queue").json()["data"]]
        assert reasons == [
            (0, "about to start"),
            (2, "no cuda device"),
            (3, "no worker w9"),
            (4, "behind 4 jobs"),
        ]
        (worker,) = checked(ada.get("/workers"), inspection.WorkerList)["data"]
        assert worker["state"] == "active"
        path = f"/workers/{worker['id']}/drain"
        assert problem(ada.post(path)) == (403, "scope_too_small")
        assert checked(root.post(path), inspection.Worker)["state"] == "draining"
        assert problem(root.post("/workers/w9/drain")) == (404, "worker_not_found")
        assert ada.get("/queue").json()["data"][0]["reason"] == "no worker"


def test_a_core_that_its_job_can_do_without_counts_as_free(
    sqlite: Database, serve: Callable[..., Api]
) -> None:
    def submit(threads: int, **more: Any) -> None:
        spec = {"kind": "train", "devices": {"type": "cpu", "threads": threads}, **more}
        with sqlite.write() as tx:
            jobs.add(tx, owner="ada", spec=spec, resolved=spec, plan={})

    make_worker(sqlite, cores=2)
    running = start(sqlite, make_job(sqlite), cores=2).job
    api = serve(sqlite)
    with services.client(api.url, services.make_key(sqlite, "ada")[1]) as ada:
        submit(2, priority=1)  # before what other tests have queued
        assert ada.get("/queue").json()["data"][0]["reason"] == "not enough free devices"
        submit(1, priority=2)
        assert ada.get("/queue").json()["data"][0]["reason"] == "about to start"
        (rank,) = ada.get(f"/jobs/{running}").json()["ranks"]
        assert (rank["device"], rank["threads"]) == ("cpu:0", 2)


def test_a_job_on_a_gpu_has_cores_and_the_next_one_waits_for_some(
    sqlite: Database, serve: Callable[..., Api], tmp_path: Path
) -> None:
    """Two GPUs, and three cores of which a job with a data worker takes two."""
    found = [FoundDevice(f"cpu:{n}", "cpu", n, "core") for n in range(3)]
    found += [FoundDevice(f"cuda:{n}", "cuda", n, "card") for n in range(2)]
    with sqlite.write() as tx:
        workers.register(tx, worker="w5", host="h", pid=1, version="0", info={}, devices=found)

    def submit() -> str:
        asked = {"type": "cuda", "worker": "w5"}
        spec = {"kind": "train", "devices": asked, "data": {"workers": 1}, "priority": 9}
        with sqlite.write() as tx:
            return jobs.add(tx, owner="ada", spec=spec, resolved=spec, plan={}).id

    first, second = submit(), submit()
    dispatch(sqlite, Settings(home=tmp_path))
    api = serve(sqlite)
    with services.client(api.url, services.make_key(sqlite, "ada")[1]) as ada:
        shown = ada.get(f"/jobs/{first}").json()
        assert [one["id"] for one in shown["devices"]] == ["cuda:0", "cpu:0", "cpu:1"]
        (rank,) = shown["ranks"]
        assert (rank["device"], rank["threads"]) == ("cuda:0", 1)
        listed = checked(ada.get("/devices"), inspection.DeviceList)["data"]
        held = [one["id"] for one in listed if one["job"] == first]
        assert held == ["cpu:0", "cpu:1", "cuda:0"]
        (entry,) = [one for one in ada.get("/queue").json()["data"] if one["job"] == second]
        assert entry["reason"] == "not enough free CPU cores"
        assert entry["devices"] == {"type": "cuda", "worker": "w5", "data_workers": 1}


LINK = dict.fromkeys(inspection.Interconnect.model_fields) | {"nvlinks": 18, "peers": {}}
FACTS = {
    "utilization_percent": 97.0,
    "processes": [{"pid": 4711, "memory_bytes": 1 << 30}],
    "compute_capability": "9.0",
    "interconnect": LINK,
}
INFO = {
    "torch": "2.13.0",
    "memory_bytes": 1 << 40,
    "cpu": {"name": "EPYC", "cores": 64, "numa_nodes": None},
    "versions": {"driver": "535.129.03", "nccl": "2.27.3"},
    "devices": {"cuda:0": FACTS},
}


def test_the_system_has_the_facts_of_each_worker_and_names_processes_to_admins_only(
    sqlite: Database, serve: Callable[..., Api]
) -> None:
    device = FoundDevice("cuda:0", "cuda", 0, "H100", uuid="GPU-1", memory_bytes=80 << 30)
    with sqlite.write() as tx:
        for name, info, devices in (("old", {}, []), ("w8", INFO, [device])):
            workers.register(
                tx, worker=name, host="h", pid=1, version="0.1.0", info=info, devices=devices
            )
    api = serve(sqlite)
    with (
        services.client(api.url, services.make_key(sqlite, "ada")[1]) as ada,
        services.client(api.url, services.make_key(sqlite, "root", "admin")[1]) as root,
    ):
        systems = checked(ada.get("/system"), inspection.SystemList)["data"]
        of_root = checked(root.get("/system"), inspection.SystemList)["data"]
        devices = checked(ada.get("/devices"), inspection.DeviceList)["data"]
        hosts = checked(ada.get("/workers"), inspection.WorkerList)["data"]
    by_name = {one["worker"]: one for one in systems}
    old, found = by_name["old"], by_name["w8"]
    (shown,) = next(one["devices"] for one in of_root if one["worker"] == "w8")
    (listed,) = [one for one in devices if one["worker"] == "w8"]
    (worker,) = [one for one in hosts if one["id"] == "w8"]
    assert old["devices"] == []
    assert old["versions"] == dict.fromkeys(inspection.VERSIONS) | {"glasshouse": "0.1.0"}
    assert set(old["cpu"].values()) == set(old["memory"].values()) == {None}
    assert found["versions"]["driver"] == "535.129.03"
    assert found["versions"]["torch"] == "2.13.0"
    assert found["cpu"]["cores"] == 64
    assert found["memory"]["total_bytes"] == 1 << 40
    (device_of_ada,) = found["devices"]
    assert device_of_ada == listed
    assert listed["processes"] == [{"pid": None, "memory_bytes": 1 << 30}]
    assert shown["processes"] == FACTS["processes"]
    assert (listed["utilization_percent"], listed["temperature_celsius"]) == (97.0, None)
    assert listed["interconnect"] == LINK
    assert "devices" not in worker["info"]
