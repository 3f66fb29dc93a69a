"""An API with two tenants, one resource of every kind, and every route with its path parameters.

The lists of routes come from the app itself. A new route is covered automatically, or fails the
tests with a message that says what to add here.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from fastapi import FastAPI
from sqlalchemy import insert

from api.app import create_app
from glasshouse.ids import new_id
from models.fleet import workers
from models.fleet.workers import FoundDevice
from models.jobs import attempts, jobs
from models.jobs.shipments import Batch
from models.observations.events import NewEvent
from models.settings import Settings
from models.storage.artifacts import LocalArtifacts
from models.tables import ServedRequest, core, now
from tests.integration.inspection.services import Writer
from tests.integration.store.factories import served_request
from tests.running import Api, digits, small_job

LEASE_MS = 3_600_000
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
UNSAFE = frozenset({"POST", "PUT", "PATCH", "DELETE"})
OPEN = frozenset(
    {"/livez", "/readyz", "/open", "/errors/{code}", "/", "/jobs", "/jobs/{id}", "/jobs/{id}/{tab}"}
    | {"/jobs/{id}/layers/{layer}", "/compare", "/datasets", "/datasets/{id}", "/devices"}
    | {"/models", "/models/{id}"}
    | {"/submit", "/settings", "/assets/{file}", "/v2/health/live", "/v2/health/ready"}
)
"""Paths that need no key. A new one is a decision: it is made here, too."""
SHARED = frozenset(
    {"/api/v1/catalog/{section}", "/docs/{file}", "/api/v1/workers/{id}/drain", "/api/v1/keys/{id}"}
    | {"/api/v1/workers/{id}"}
)
"""Paths with places that are nobody's own: the service's, or for admins only."""
READING_POSTS = frozenset(
    {"/api/v1/plan", "/api/v1/tickets", "/api/v1/models/{name}/predict", "/v2/repository/index"}
    | {"/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer"}
    | {"/api/v1/jobs/{id}/predict"}
)
"""POSTs that change nothing of anybody's, and so need the scope ``read`` only."""
PROBE = {"layers": ["fc"], "kinds": ["output"], "every": 5}
MERGE = "application/merge-patch+json"
INFER = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}


@dataclass(frozen=True)
class Route:
    """One operation of the app."""

    method: str
    path: str
    scope: str | None

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def places(self) -> list[str]:
        """The names of its path parameters."""
        return [part.split("}")[0] for part in self.path.split("{")[1:]]


@cache
def all_routes() -> list[Route]:
    """Every operation of the app of a service that nobody starts."""
    with tempfile.TemporaryDirectory() as home:
        app = create_app(Settings(home=Path(home)))
        try:
            return routes_of(app)
        finally:
            app.state.resources.database.close()


def routes_of(app: FastAPI) -> list[Route]:
    """Every operation of the app's own table, mounted apps included."""
    found = [Route(method, path, scope) for method, path, scope in _walk(app.routes, "")]
    assert len(found) > 40, "the walk finds nothing"
    return sorted(set(found), key=str)


def _walk(routes: Iterable[Any], prefix: str) -> Iterator[tuple[str, str, str | None]]:
    for route in routes:
        if (router := getattr(route, "original_router", None)) is not None:
            yield from _walk(router.routes, prefix + route.include_context.prefix)
        elif getattr(route, "dependant", None) is not None and getattr(route, "methods", None):
            for method in route.methods:
                yield method, prefix + route.path, _scope_of(route)
        else:  # a mounted app, a WebSocket, a static folder
            raise AssertionError(f"{route!r} is of a kind that these tests cannot look into")


def _scope_of(route: Any) -> str | None:
    names = [getattr(found.call, "__name__", "") for found in route.dependant.dependencies]
    scopes = [name.removeprefix("needs_") for name in names if name.startswith("needs_")]
    assert len(scopes) <= 1, f"{route.path} asks for several scopes"
    return scopes[0] if scopes else None


@dataclass
class PopulatedApi:
    """A running API with resources of the tenant Ada. The tenant Bob has only a key."""

    api: Api
    ada: str = ""
    bob: str = ""
    reader: str = ""
    """A key of Ada with the scope ``read``."""
    ids: dict[str, str] = field(default_factory=dict[str, str])
    """The part of a path before a parameter → the id of Ada's resource."""

    def fill(self) -> None:
        """Create one resource of every kind for Ada, as a worker would."""
        api = self.api
        self.ada, self.bob = api.key("ada", "submit"), api.key("bob", "submit")
        self.reader = api.key("ada", "read")
        with api.client(self.ada) as ada:
            self.ids["datasets"] = digits(ada)
            spec = small_job(self.ids["datasets"], name="watched")
            job = ada.post("/api/v1/jobs", json=spec).json()["id"]
            writer = _run(api, job)
            self.ids |= {"jobs": job} | _leave_traces(writer, api.settings.artifacts)
            self.ids["models"] = "model-of-ada"
            made = ada.post(f"/api/v1/jobs/{job}/probes", json=PROBE)
            assert made.status_code == 201, made.text
            self.ids["probes"] = made.json()["id"]
            hook = ada.post("/api/v1/webhooks", json={"url": "https://example.com/ada"})
            assert hook.status_code == 201, hook.text
            self.ids["webhooks"] = hook.json()["id"]
            sent = ada.post("/api/v1/checkpoints", content=weights())
            assert sent.status_code == 201, sent.text
            published = {"name": self.ids["models"], "checkpoint": sent.json()["id"]}
            for _ in range(2):
                made = ada.post("/api/v1/models", json=published)
                assert made.status_code == 201, made.text
            queued = ada.post("/api/v1/jobs", json=spec)
            assert queued.status_code == 201, queued.text
        with api.client() as admin:
            listed = admin.get("/api/v1/keys").json()["data"]
        self.ids["keys"] = next(key["id"] for key in listed if key["owner"] == "ada")
        self.ids["workers"] = f"w-{job}"
        with api.database.write() as tx:
            row = jobs.get(tx, job, None)
            jobs.request_cancel(tx, row, by="ada", force=False)
        with api.database.read() as tx:
            self.ids["commands"] = jobs.commands_pending(tx, job)[0].id

    def places(self, path: str) -> dict[str, str]:
        """The ids of Ada's resources by the parameters of a path."""
        words = path.strip("/").split("/")
        found: dict[str, str] = {}
        for before, word in zip(["", *words], words, strict=False):
            if word.startswith("{"):
                found[word.strip("{}")] = self.id_after(before, path)
        return found

    def id_after(self, before: str, path: str) -> str:
        """The id of Ada's resource after this part of a path."""
        known = self.ids | _NAMES
        if before.startswith("{"):
            before = before.strip("{}")
        assert before in known, (
            f"the security tests do not know the parameter after {before!r} of {path}: create a "
            "resource for it in PopulatedApi.fill (tests/security/populated_api.py)"
        )
        return known[before]

    def filled(self, path: str) -> str:
        """A path with the ids of Ada's resources."""
        return path.format(**self.places(path))


def _run(api: Api, job: str) -> Writer:
    """Let a worker that is none take a job."""
    writer = Writer(api.database, None)
    device = FoundDevice("cpu:0", "cpu", 0, "core")
    with api.database.write() as tx:
        writer.job = jobs.get(tx, job, None)
        name = f"w-{job}"
        workers.register(tx, worker=name, host="h", pid=1, version="0", info={}, devices=[device])
        found = [row for row, _ in workers.all_devices(tx, lease_ms=LEASE_MS)]
        assert attempts.assign(tx, job, name, found, LEASE_MS)
    with api.database.write() as tx:
        taken = attempts.claim(tx, job, name)
        assert taken is not None
        writer.claim = taken[0]
        attempts.run(tx, writer.claim, lease_ms=LEASE_MS)
    return writer


_NAMES = {
    "layers": "fc",
    "layer": "output",
    "artifacts": "outputs.npz",
    "plots": "loss",
    "catalog": "layers",
    "docs": "start.js",
    "errors": "job_not_found",
    "id": "stats",
    "assets": "main.js",
    "versions": "1",
}
"""Places that have names rather than ids."""


def _leave_traces(writer: Writer, root: Path) -> dict[str, str]:
    """Events, series, statistics, a capture, a checkpoint, an artifact, of Ada's running job."""
    job = writer.job.id
    store = LocalArtifacts(root)
    data = safetensors.numpy.save({"tensor": np.arange(12, dtype=np.float32)})
    capture, checkpoint = new_id("cap"), new_id("ckpt")
    base = f"jobs/{job}/1"
    for key in (
        f"{base}/captures/{capture}.safetensors",
        f"{base}/checkpoints/{checkpoint}/model.safetensors",
        f"{base}/artifacts/outputs.npz",
    ):
        with store.receive(key) as path:
            path.write_bytes(data)
    writer.losses([3.0, 2.0, 1.0])
    writer.print("a line that only ada may read")
    writer.ship(
        Batch(
            events=[NewEvent("checkpoint", now(), {"checkpoint": checkpoint, "step": 3})],
            stats=[{"step": 0, "phase": "train", "rows": [["fc", "output", *[0.5] * 9]]}],
            captures=[
                {"id": capture, "step": 0, "layer": "fc", "kind": "output", "phase": "train"}
                | {"shape": [12], "dtype": "float32", "size_bytes": 48}
                | {"key": f"{base}/captures/{capture}.safetensors"}
            ],
            checkpoints=[
                {"id": checkpoint, "owner": "ada", "key": f"{base}/checkpoints/{checkpoint}"}
                | {"created_at": now(), "step": 3, "epoch": 0, "final": True, "metrics": {}}
                | {"size_bytes": len(data)}
                | {"files": {"model.safetensors": {"size_bytes": len(data), "sha256": "ab"}}}
            ],
            artifacts=[
                {"name": "outputs.npz", "media_type": "application/octet-stream"}
                | {"size_bytes": len(data), "key": f"{base}/artifacts/outputs.npz"}
            ],
        )
    )
    with writer.database.write() as tx:
        tx.execute(insert(core(ServedRequest)), [served_request(job)])
    return {"checkpoints": checkpoint, "captures": capture}


def body_of(route: Route, populated: PopulatedApi) -> dict[str, Any]:
    """The options of a request with a body that the route can read, where it wants one."""
    spec = small_job(populated.ids["datasets"])
    bodies: dict[str, Any] = {
        "POST /api/v1/plan": spec,
        "POST /api/v1/jobs": spec,
        "POST /api/v1/datasets": {"builtin": "digits"},
        "POST /api/v1/keys": {"name": "more", "scopes": ["read"]},
        "PUT /api/v1/quotas": {"owner": "ada"},
        "POST /api/v1/jobs/{id}/probes": PROBE,
        "PATCH /api/v1/jobs/{id}/probes/{prb}": {"every": 7},
        "PATCH /api/v1/jobs/{id}": {"name": "mine now"},
        "POST /api/v1/jobs/{id}/commands": {"set": {"optimizer.lr": 0.001}},
        "POST /api/v1/jobs/{id}/fork": {"spec": {"optimizer": {"args": {"lr": 0.001}}}},
        "POST /api/v1/models": {"name": "mine", "checkpoint": populated.ids["checkpoints"]},
        "PATCH /api/v1/models/{name}": {"aliases": {"mine": 1}},
        "POST /api/v1/jobs/{id}/predict": {"rows": [{"x": [1.0, 2.0]}]},
        "POST /api/v1/models/{name}/predict": {"rows": [{"x": [1.0, 2.0]}]},
        "POST /api/v1/webhooks": {"url": "https://example.org/hook"},
        "PATCH /api/v1/webhooks/{id}": {"url": "https://example.org/other"},
        "POST /v2/models/{name}/infer": INFER,
        "POST /v2/models/{name}/versions/{version}/infer": INFER,
        "POST /v2/repository/index": {"ready": True},
    }
    if str(route) == "POST /api/v1/checkpoints":
        return {"content": weights()}
    if str(route) not in bodies:
        return {}
    media = MERGE if route.method == "PATCH" else "application/json"
    return {"content": json.dumps(bodies[str(route)]), "headers": {"Content-Type": media}}


def weights() -> bytes:
    """A file of weights that the service takes."""
    layers = [{"name": "act", "type": "ReLU", "inputs": ["x"]}]
    fc = {"name": "fc", "type": "Linear", "args": {"in_features": 2, "out_features": 1}}
    network = json.dumps({"layers": [*layers, fc]})
    tensors = {"fc.weight": np.ones((1, 2), np.float32), "fc.bias": np.ones(1, np.float32)}
    return safetensors.numpy.save(tensors, metadata={"network": network})


QUERIES = {
    "GET /api/v1/stream": "?job={jobs}",
    "GET /api/v1/jobs/{id}/metrics/query": "?name=loss",
    "GET /api/v1/jobs/{id}/tensors": "?name=fc/output",
}
"""What a route must be asked."""


def url_of(route: Route, populated: PopulatedApi) -> str:
    """The address of Ada's thing on a route."""
    return populated.filled(route.path) + QUERIES.get(str(route), "").format(**populated.ids)
