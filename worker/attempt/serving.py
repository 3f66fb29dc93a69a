"""What ranks that answer requests must know: where to listen, and the models of a serve job."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import structlog

from glasshouse import jsonio
from glasshouse.errors import NotFound
from glasshouse.spec import ServeJob, parse_job
from glasshouse.spec.data import train_sources_in
from models import published_models
from models.database import Transaction
from models.jobs import checkpoints, live_predictions, replicas
from models.settings import Settings
from models.storage import datasets
from models.storage.artifacts import Artifacts
from models.tables import Job
from worker.attempt.control import CommandDelivery
from worker.attempt.resume import Attempt
from worker.context import AWAY
from worker.processes.ranks import Ranks

_log: Any = structlog.get_logger()
LOOK_EVERY_S = 0.5
"""How often the versions that aliases name are looked up."""
REFERENCES = "drift"
"""The directory of histograms of training rows, beside that of the checkpoints."""
_MAX_SOCKET_PATH = 100
"""Longer paths of sockets are refused by some systems."""


def listen_at(settings: Settings, directory: Path) -> dict[str, Any]:
    """Return where a rank that answers requests listens: see ``engine.serving.listener``.

    ``directory``: that of its attempt.
    """
    if settings.serve_host:
        return {"host": settings.serve_host, "port": 0}
    path = str(directory / "serve.sock")
    return {"path": path} if len(path) <= _MAX_SOCKET_PATH else {"host": "127.0.0.1", "port": 0}


def models_of(tx: Transaction, job: Job, artifacts: Artifacts) -> list[dict[str, Any]]:
    """Return the versions that the references of a serve job name now, with their files.

    `with_networks` adds the rest of what a rank needs.

    Raises:
        NotFound: a model, a version or a file is gone.
    """
    spec = parse_job(jsonio.dumps(job.resolved))
    assert isinstance(spec, ServeJob)  # noqa: S101 (its kind)
    found: list[dict[str, Any]] = []
    for entry in spec.entries:
        described = {"reference": entry.model} | _version(tx, job, entry.model, artifacts)
        for part in ("canary", "shadow"):
            if (other := getattr(entry, part)) is not None:
                version = _version(tx, job, other.model, artifacts)
                described[part] = version | {"share": other.share}
        found.append(described)
    return found


def with_networks(
    tx: Transaction, models: Iterable[dict[str, Any]], artifacts: Artifacts
) -> list[dict[str, Any]]:
    """Return versions with the specs that they were trained by, which may be large.

    Also with the directories of their training rows, which may have been deleted, and the directory
    in which histograms of these are kept.
    """
    found: list[dict[str, Any]] = []
    for described in models:
        whole = {**described, **_training(tx, described, artifacts)}
        for part in ("canary", "shadow"):
            if (other := described.get(part)) is not None:
                whole[part] = {**other, **_training(tx, other, artifacts)}
        found.append(whole)
    return found


def _training(
    tx: Transaction, described: Mapping[str, Any], artifacts: Artifacts
) -> dict[str, Any]:
    saved = checkpoints.get(tx, str(described["checkpoint"]), None)
    trained_by = checkpoints.trained(tx, saved)
    names = {str(part["dataset"]) for part in train_sources_in(trained_by)}
    kept = saved.job is not None
    return {
        "trained_by": trained_by,
        "datasets": {name: _directory(tx, name, artifacts) for name in sorted(names)},
        # beside the checkpoints of the attempt; it is deleted with the job
        "references": str(Path(described["dir"]).parent.parent / REFERENCES) if kept else None,
    }


def _directory(tx: Transaction, dataset: str, artifacts: Artifacts) -> str | None:
    """Return the directory of a dataset; None: it was deleted."""
    try:
        return str(artifacts.local(datasets.get(tx, dataset, None).key))
    except (NotFound, FileNotFoundError):
        return None


def hold(tx: Transaction, job: Job, models: Iterable[Mapping[str, Any]]) -> None:
    """Keep the checkpoints of versions from being deleted while a serve job loads them.

    Raises:
        CheckpointNotFound: one is gone.
    """
    for described in models:
        for part in (described, described.get("canary"), described.get("shadow")):
            if part is not None:
                checkpoints.hold(tx, str(part["checkpoint"]))
                replicas.also_use(tx, job.id, str(part["checkpoint"]))


def _version(tx: Transaction, job: Job, reference: str, artifacts: Artifacts) -> dict[str, Any]:
    one = published_models.by_reference(tx, reference, owner=job.owner)
    return {
        "model": one.model.name,
        "version": one.version.number,
        "checkpoint": one.checkpoint.id,
        "dir": str(artifacts.local(one.checkpoint.key)),
    }


class ModelDelivery:
    """Tells the rank of a serve job when a reference names another version."""

    def __init__(self, attempt: Attempt, control: CommandDelivery) -> None:
        self._attempt, self._control = attempt, control
        self._is_serving = attempt.job.kind == "serve"
        self._names: list[Any] | None = None
        """The versions that the rank has."""
        self._look_at = 0.0
        self._is_unknown = False

    def started(self, models: list[dict[str, Any]]) -> None:
        """Note what is in the rank's ``job.json``."""
        self._names = _names(models)

    def deliver(self, ranks: Ranks) -> None:
        """Look for other versions from time to time, and send them to the rank."""
        at = time.monotonic()
        if not self._is_serving or at < self._look_at:
            return
        self._look_at = at + LOOK_EVERY_S
        context, job = self._attempt.context, self._attempt.job
        try:
            with context.database.read() as tx:
                models = models_of(tx, job, context.artifacts)
            if changed := _names(models) != self._names:
                with context.database.write() as tx:
                    hold(tx, job, models)
                    models = with_networks(tx, models, context.artifacts)
        except AWAY:
            return
        except (NotFound, FileNotFoundError) as error:
            if not self._is_unknown:
                _log.warning("served_model_gone", error=str(error))
            self._is_unknown = True  # it keeps serving the versions that it has
            return
        self._is_unknown = False
        if changed and self._control.send(ranks, "models", models):
            self._names = _names(models)


class PredictionDelivery:
    """Tells the rank of a training job where to listen, once somebody asks for a prediction."""

    def __init__(self, attempt: Attempt, control: CommandDelivery) -> None:
        self._attempt, self._control = attempt, control
        self._num_seen: int = 0
        """The number of commands after which was looked."""
        self._is_needless = attempt.job.kind != "train"
        """Whether nothing remains to be sent."""

    def deliver(self, ranks: Ranks) -> None:
        """Look whether somebody asks, if there may be news."""
        if self._is_needless or self._control.num_commands == self._num_seen:
            return
        seen, claim, context = (
            self._control.num_commands,
            self._attempt.claim,
            self._attempt.context,
        )
        try:
            with context.database.read() as tx:
                is_asked = live_predictions.is_asked(tx, claim)
        except AWAY:
            return
        self._num_seen = seen
        if is_asked:
            at = listen_at(context.settings, self._attempt.directory)
            ranks.tell({"do": "listen", "job": claim.job, "at": at})
            self._is_needless = True


def _names(models: list[dict[str, Any]]) -> list[Any]:
    def name(described: Mapping[str, Any] | None) -> Any:
        return described and (described["model"], described["version"])

    return [
        (one["reference"], name(one), name(one.get("canary")), name(one.get("shadow")))
        for one in models
    ]
