"""The queue, the workers and the devices, in a service of their own."""

from collections.abc import Callable
from typing import Any

from redis import Redis

from api.schemas import inspection
from models.database import Database
from models.jobs import jobs
from tests.integration.inspection import services
from tests.integration.inspection.services import Api, Writer, checked, problem


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
