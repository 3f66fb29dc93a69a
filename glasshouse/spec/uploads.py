"""The spec of an uploaded network: of a checkpoint whose weights were not trained by a job."""

from functools import cached_property
from typing import Literal, Self

from pydantic import Field as Constraint
from pydantic import TypeAdapter, model_validator

from glasshouse.spec.data import Data, Field, Source
from glasshouse.spec.jobs import AnyJob, JobSpec
from glasshouse.spec.jobs.train_job import Network, TrainJob
from glasshouse.spec.strict import Name, Spec, WrongAt


class UploadedNetwork(Spec):
    """The network of uploaded weights, and its input fields."""

    kind: Literal["upload"] = "upload"
    """Selects an uploaded network."""
    network: Network
    """A graph in which all sizes of layers are set, or a preset."""
    fields: dict[Name, Field] = Constraint(default={}, max_length=1000)
    """The inputs of the network, as in ``data.fields`` of a job. Inference requires them; a
    training job has its own. Example: ``{"image": {"type": "dense", "shape": [1, 28, 28]}}``."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for number, layer in enumerate(self.network.layers):
            if layer.name in self.fields:
                detail = f"{layer.name!r} names a layer and a data field; rename one"
                raise WrongAt("network", "layers", number, detail=detail)
        return self

    @cached_property
    def data(self) -> Data:
        """The fields as the ``data`` of a training job, with placeholders for everything else."""
        return Data.model_construct(train=Source(dataset="none"), fields=self.fields, batch_size=1)


Trained = TrainJob | UploadedNetwork
"""The spec of the network of a checkpoint."""
_TRAINED: TypeAdapter[AnyJob | UploadedNetwork] = TypeAdapter(JobSpec | UploadedNetwork)


def parse_trained(body: bytes | str) -> Trained | None:
    """Read the spec of a checkpoint from JSON; None if it is of a job that trains nothing.

    Raises:
        pydantic.ValidationError: with one entry for each wrong field.
    """
    found = _TRAINED.validate_json(body)
    return found if isinstance(found, TrainJob | UploadedNetwork) else None
