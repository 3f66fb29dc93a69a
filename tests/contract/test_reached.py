"""Every operation of the API is a method of the client, of the blocking one and the awaited one."""

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import glasshouse as gh
from tests.blocking_client import blocking_client
from tests.stub_api import Serve, answer, job, serve, server

__all__ = ["serve", "server"]
ROOT = Path(gh.__file__).parents[1]
OPENAPI = json.loads((ROOT / "docs/reference/openapi.json").read_text())
OPERATIONS = {
    operation["operationId"]: (method.upper(), path)
    for path, methods in OPENAPI["paths"].items()
    for method, operation in methods.items()
    if "operationId" in operation
}
NOT_METHODS = {
    "getLivez": "for process managers; a client calls `ready`",
    "getMetrics": "for Prometheus, in its text; `client.request` reads it where somebody must",
}
NOT_METHODS |= dict.fromkeys(
    (name for name, (_, path) in OPERATIONS.items() if path.startswith("/v2")),
    "of the Open Inference Protocol, for the clients of other servers; `predict` is the client's",
)
GRAPH = {"type": "graph", "layers": [{"name": "fc", "type": "Linear"}]}
JOB = "job_1"
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "getService": lambda client, one: client.info(),
    "getCatalog": lambda client, one: client.catalog.get("layers"),
    "createKey": lambda client, one: client.keys.create("ci", ["read"], "me"),
    "listKeys": lambda client, one: client.keys.list(),
    "deleteKey": lambda client, one: client.keys.delete("key_1"),
    "createTicket": lambda client, one: client.browser_link(),
    "createDataset": lambda client, one: client.datasets.create("digits"),
    "listDatasets": lambda client, one: list(client.datasets.list()),
    "getDataset": lambda client, one: client.datasets.get("ds_1"),
    "deleteDataset": lambda client, one: client.datasets.delete("ds_1"),
    "listDatasetRows": lambda client, one: client.datasets.rows("ds_1"),
    "getDatasetStats": lambda client, one: client.datasets.stats("ds_1"),
    "createCheckpoint": lambda client, one: client.checkpoints.create(
        {"fc.weight": np.ones(2, np.float32)}, GRAPH
    ),
    "listAllCheckpoints": lambda client, one: client.checkpoints.list(),
    "getNetwork": lambda client, one: client.checkpoints.get("ckpt_1").network(),
    "publishModel": lambda client, one: client.models.publish("m", "ckpt_1"),
    "listModels": lambda client, one: list(client.models.list()),
    "getModel": lambda client, one: client.models.get("m"),
    "getModelVersion": lambda client, one: client.models.version("m@production"),
    "updateModel": lambda client, one: client.models.set_alias("m", "production", 1),
    "deleteModel": lambda client, one: client.models.delete("m"),
    "deleteModelVersion": lambda client, one: client.models.delete("m", 1),
    "predict": lambda client, one: client.predict("m@production", np.ones((1, 2), np.float32)),
    "predictWithJob": lambda client, one: one.predict(np.ones((1, 2), np.float32)),
    "planJob": lambda client, one: client.plan({"kind": "train"}),
    "createJob": lambda client, one: client.jobs.create({"kind": "train"}),
    "listJobs": lambda client, one: list(client.jobs.list()),
    "getJob": lambda client, one: client.jobs.get(JOB),
    "updateJob": lambda client, one: one.update(name="new"),
    "deleteJob": lambda client, one: one.delete(),
    "cancelJob": lambda client, one: one.cancel(),
    "getJobSpec": lambda client, one: one.spec(),
    "pauseJob": lambda client, one: one.pause(),
    "resumeJob": lambda client, one: one.resume(),
    "retryJob": lambda client, one: one.retry(),
    "forkJob": lambda client, one: one.fork(),
    "createCommand": lambda client, one: one.set(lr=0.1),
    "listCommands": lambda client, one: one.commands(),
    "getCommand": lambda client, one: one.get_command("cmd_1"),
    "getReadyz": lambda client, one: client.ready(),
    "createWebhook": lambda client, one: client.webhooks.create("https://example.org/"),
    "listWebhooks": lambda client, one: client.webhooks.list(),
    "getWebhook": lambda client, one: client.webhooks.get("whk_1"),
    "deleteWebhook": lambda client, one: client.webhooks.delete("whk_1"),
    "listDeliveries": lambda client, one: client.webhooks.deliveries("whk_1"),
    "getQuotas": lambda client, one: client.quotas.get(),
    "setQuotas": lambda client, one: client.quotas.put("me", devices=2),
    "listEvents": lambda client, one: list(one.events()),
    "streamJob": lambda client, one: list(one.stream()),
    "streamJobs": lambda client, one: list(client.stream([JOB, "job_2"])),
    "listMetrics": lambda client, one: one.metrics(),
    "queryMetrics": lambda client, one: one.metrics("loss"),
    "listLayers": lambda client, one: one.layers.table(),
    "listCaptures": lambda client, one: one.captures(),
    "getTensor": lambda client, one: one.layers["fc"].output(),
    "getTensors": lambda client, one: one.tensors(["fc/output"]),
    "queryStats": lambda client, one: list(one.layers["fc"].all_stats()),
    "createProbe": lambda client, one: one.probe("fc"),
    "listProbes": lambda client, one: one.probes(),
    "getProbe": lambda client, one: one.get_probe("prb_1"),
    "updateProbe": lambda client, one: one.get_probe("prb_1").update(every=2),
    "removeProbe": lambda client, one: one.get_probe("prb_1").remove(),
    "listCheckpoints": lambda client, one: one.checkpoints(),
    "getCheckpoint": lambda client, one: client.checkpoints.get("ckpt_1"),
    "deleteCheckpoint": lambda client, one: client.checkpoints.delete("ckpt_1"),
    "getWeights": lambda client, one: client.checkpoints.get("ckpt_1").weights(),
    "getLearned": lambda client, one: client.checkpoints.get("ckpt_1").learned(),
    "listArtifacts": lambda client, one: one.artifacts(),
    "getArtifact": lambda client, one: one.artifact("outputs.safetensors"),
    "listRequests": lambda client, one: list(one.requests()),
    "deleteRequests": lambda client, one: one.delete_requests(),
    "getLogs": lambda client, one: one.logs(),
    "getPlot": lambda client, one: one.plot(),
    "listDevices": lambda client, one: client.devices.list(),
    "listSystems": lambda client, one: client.system(),
    "listWorkers": lambda client, one: client.workers.list(),
    "drainWorker": lambda client, one: client.workers.drain("w_1"),
    "removeWorker": lambda client, one: client.workers.delete("w_1"),
    "listQueue": lambda client, one: client.queue(),
}
ANY = {
    **job(state="ready"),
    **{"object": "list", "data": [], "has_more": False, "next": None, "job": JOB},
    **{"splits": {"all": 1}, "columns": [], "entries": [], "url": "http://x", "network": GRAPH},
    **{"step": [], "values": {"loss": []}, "epoch": []},
}


class Anything:
    """Answers whatever is asked with a document that has all fields, and keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    async def __call__(self, request: Request) -> Response:
        path = request.url.path
        self.asked.append((request.method, path))
        if path.endswith("/stream"):
            return Response(status_code=204)
        if path.endswith("/predict"):
            origins = {"X_Model_Version": "m:1", "X_Job_Step": "job_1:2"}
            return answer({"outputs": {"fc/value": [[1.0]]}}, **origins)
        wants_bytes = path.endswith(("/weights", "/data", "/tensors", "/output"))
        tensors = save({"fc": np.ones(2, np.float32)})
        return Response(tensors) if wants_bytes else answer({**ANY, "id": path.split("/")[-1]})


@pytest.fixture(params=["blocking", "awaited"])
def make_client(request: pytest.FixtureRequest) -> Generator[Callable[..., gh.Client]]:
    """Makes a client of either kind."""
    if request.param == "blocking":
        yield gh.Client
        return
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        yield lambda *given: blocking_client(loop, *given)


def test_every_operation_has_a_method_or_a_reason_to_have_none():
    assert CALLS.keys() | NOT_METHODS.keys() == OPERATIONS.keys()
    assert not CALLS.keys() & NOT_METHODS.keys()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.long
def test_the_method_of_an_operation_asks_for_it(
    serve: Serve, make_client: Callable[..., gh.Client], name: str
):
    anything = Anything()
    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]

    async def endpoint(request: Request) -> Response:
        return await anything(request)

    with make_client(serve([Route("/{path:path}", endpoint, methods=methods)]), "k") as client:
        CALLS[name](client, client.jobs._job(JOB))
    method, template = OPERATIONS[name]
    pattern = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(template))
    found = [path for asked, path in anything.asked if asked == method]
    assert any(re.fullmatch(pattern, path) for path in found), (name, anything.asked)


TYPED = {
    "Job": (gh.Job, {"object", "id"}),
    "Dataset": (gh.Dataset, {"object", "id"}),
    "Checkpoint": (gh.Checkpoint, {"object", "id"}),
    "Command": (gh.Command, {"object", "id"}),
    "Model": (gh.Model, {"object", "id"}),
    "ModelVersion": (gh.ModelVersion, {"object"}),
    "AttachedProbe": (gh.Probe, {"object", "id"}),
}


@pytest.mark.parametrize("schema", TYPED)
def test_every_field_of_a_resource_is_typed(schema: str):
    cls, of_all = TYPED[schema]
    known = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", ())}
    known |= {name for name in dir(cls) if isinstance(getattr(cls, name), property)}
    wanted = set(OPENAPI["components"]["schemas"][schema]["properties"])
    by_method = {"result"} if schema == "Job" else set()  # which waits for it
    assert wanted - known == by_method
    declared = set(inspect.get_annotations(cls)) - of_all
    assert declared <= wanted, "a field that the service does not have"


def test_fields_of_a_later_service_are_kept_and_come_out_as_json(
    serve: Serve, make_client: Callable[..., gh.Client]
):
    served = serve([Route("/api/v1/jobs/job_1", lambda _: answer(job(wings=2)))])
    with make_client(served, "k") as client:
        found = client.jobs.get(JOB)
        assert found.wings == 2
        assert json.loads(found.to_json()) == job(wings=2)
        with pytest.raises(AttributeError, match="no attribute or field 'feathers'"):
            found.feathers  # noqa: B018


def test_no_module_of_the_client_asks_for_a_path_that_is_not_there():
    text = "\n".join(path.read_text() for path in (ROOT / "glasshouse/client/aio").glob("*.py"))
    ends = {path.rsplit("/", 1)[-1] for _, path in OPERATIONS.values()}
    asked = set(re.findall(r'\{self\.path\}/(\w+)[/"?]', text))
    assert asked
    assert asked <= ends | {"artifacts", "plots"}
