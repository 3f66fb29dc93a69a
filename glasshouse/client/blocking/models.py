# Made from glasshouse/client/aio/models.py by .ci/twins.py: change that file.
"""Published models: ``client.models``, and models and their versions as client objects."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Unpack

from glasshouse.client.blocking.job import Job
from glasshouse.client.blocking.prediction import predict
from glasshouse.client.blocking.records import Checkpoint, Record
from glasshouse.client.blocking.resources import Resource
from glasshouse.client.blocking.transport import Transport
from glasshouse.client.connection.requests import id_in_path, model_in_path
from glasshouse.client.data.predictions import Prediction
from glasshouse.client.training.specs import PredictOptions
from glasshouse.errors import APIError
from glasshouse.spec.model_names import LATEST, parse_model_reference


class ModelVersion(Record):
    """A version of a published model: a checkpoint that cannot be deleted."""

    model: str
    """The name of the model."""
    version: int
    aliases: list[str]
    checkpoint: str
    """The id of the checkpoint."""
    job: str | None
    """The id of the job that saved it. None for uploaded weights."""
    step: int
    epoch: int
    state: str
    """``complete`` or ``damaged``, of the checkpoint."""
    size_bytes: int
    metrics: dict[str, Any]
    """The metrics when the checkpoint was saved. NaN and Inf are strings, as in JSON."""
    created_at: str
    created_by: str | None
    """The name of the API key that published it."""
    links: dict[str, str]

    @property
    def id(self) -> str:
        """The reference to this version: ``mnist:3``."""
        return f"{self.model}:{self.version}"

    @property
    def path(self) -> str:
        """The path of the version under ``/api/v1``."""
        return f"/models/{self.model}/versions/{self.version}"

    def predict(
        self, inputs: Any = None, *, rows: Any = None, **options: Unpack[PredictOptions]
    ) -> Prediction:
        """Run this version, which a serve job must serve: see `Client.predict`."""
        return predict(self._transport, self.id, inputs, rows, options)


class Model(Record):
    """A published model: numbered versions under a name, and aliases that name a version."""

    name: str
    latest: int
    """The number of the newest version."""
    num_versions: int
    aliases: dict[str, int]
    """By alias, the number of the version that it names."""
    served_by: list[dict[str, Any]]
    """The serve jobs that name the model: ``job``, ``reference``, ``version`` and ``state``. The
    version is None while no process of the job runs."""
    created_at: str
    updated_at: str
    links: dict[str, str]

    @property
    def path(self) -> str:
        """The path of the model under ``/api/v1``."""
        return f"/models/{self.id}"

    @property
    def versions(self) -> list[ModelVersion]:
        """The versions, newest first.

        Raises:
            APIError: the model is an entry of a list, which has none.
        """
        if "versions" not in self.data:
            detail = f"a list has models without their versions: client.models.get({self.name!r})"
            raise APIError(detail)
        return [ModelVersion(self._transport, entry) for entry in self.data["versions"]]

    def predict(
        self, inputs: Any = None, *, rows: Any = None, **options: Unpack[PredictOptions]
    ) -> Prediction:
        """Run the newest version, which a serve job must serve: see `Client.predict`."""
        return predict(self._transport, self.name, inputs, rows, options)


class Models(Resource):
    """The published models."""

    def publish(
        self,
        name: str,
        source: Checkpoint | Job | str,
        *,
        aliases: Sequence[str] = (),
    ) -> ModelVersion:
        """Publish a checkpoint as the next version of a model, or as version 1 of a new one.

        The checkpoint, and its job, cannot be deleted while the version exists.

        Args:
            name: the name of the model: letters, digits, ``_``, ``-`` and ``.``.
            source: a checkpoint or its id, a job or its id (its newest checkpoint is published), or
                a version of a model: ``"mnist@candidate"``, ``"mnist:2"``.
            aliases: aliases that name the new version from now on.

        Raises:
            UnprocessableEntityError: a name is not valid, or there is no such checkpoint.
        """
        chosen = source if isinstance(source, str) else source.id
        field = "job" if chosen.startswith("job_") else "checkpoint"
        body = {"name": name, field: chosen, "aliases": list(aliases)}
        data = self._transport.create("/models", body)
        return ModelVersion(self._transport, data)

    def get(self, name: str) -> Model:
        """Fetch one model by its name or id, with its versions."""
        return Model(self._transport, self._transport.get(f"/models/{_checked(name)}"))

    def version(self, reference: str) -> ModelVersion:
        """Fetch one version: ``"mnist"`` (the newest), ``"mnist@production"`` or ``"mnist:3"``."""
        wanted = model_in_path(reference)
        path = f"/models/{wanted.name}/versions/{wanted.version or LATEST}"
        return ModelVersion(self._transport, self._transport.get(path))

    def list(self, *, limit: int | None = None) -> Generator[Model]:
        """Iterate over all models, newest first; ``limit`` is the page size of the requests."""
        for page in self._transport.pages("/models", {"limit": limit}):
            for entry in page:
                yield Model(self._transport, entry)

    def set_alias(self, name: str, alias: str, version: int) -> Model:
        """Let an alias name a version of a model, instead of the one that it named before."""
        return self.set_aliases(name, {alias: version})

    def remove_alias(self, name: str, alias: str) -> Model:
        """Remove an alias of a model. Nothing happens if the model does not have it."""
        return self.set_aliases(name, {alias: None})

    def set_aliases(self, name: str, aliases: Mapping[str, int | None]) -> Model:
        """Move several aliases of a model at once: all of them, or none.

        Args:
            name: the name of the model.
            aliases: by alias, the number of the version that it names from now on; None removes
                the alias.

        Raises:
            UnprocessableEntityError: the model does not have one of the versions.
        """
        body = {"aliases": dict(aliases)}
        data = self._transport.patch(f"/models/{_checked(name)}", body)
        return Model(self._transport, data)

    def delete(self, name: str, version: int | None = None) -> None:
        """Delete a model, or one version of it. Checkpoints stay.

        Args:
            name: the name of the model.
            version: the number of the version to delete. Default: the whole model.

        Raises:
            ConflictError: an alias names the version, it is the only one, or a job that has not
                ended uses it.
        """
        path = f"/models/{_checked(name)}"
        self._transport.delete(path if version is None else f"{path}/versions/{version}")


def checkpoint_of(transport: Transport, reference: str) -> Checkpoint:
    """Fetch the checkpoint of a version of a model."""
    version = Models(transport).version(reference)
    data = transport.get(f"/checkpoints/{version.checkpoint}")
    return Checkpoint(transport, data)


def _checked(name: str) -> str:
    """Check a name or an id of a model that becomes part of a path.

    Raises:
        ValueError: it is none. A slash or a question mark would change the path.
    """
    wanted = parse_model_reference(name)
    if wanted is not None and wanted.version is None:
        return name
    if not name.startswith("mdl_"):
        raise ValueError(f"{name!r} is not a valid name of a model")
    return id_in_path(name, "model")
