"""A network whose weights a client sends, as a checkpoint is told of it that no job has made."""

from functools import cached_property
from typing import Literal, Self

from pydantic import Field as Constraint
from pydantic import TypeAdapter, model_validator

from glasshouse.spec.data import Data, Field, Source
from glasshouse.spec.jobs import InferJob, JobSpec, Network, TrainJob
from glasshouse.spec.strict import Name, Spec, WrongAt


class UploadedNetwork(Spec):
    """The network of weights that were sent, and the fields that it reads."""

    kind: Literal["upload"] = "upload"
    network: Network
    """A graph whose layers give all their sizes, or a preset."""
    fields: dict[Name, Field] = Constraint(default={}, max_length=1000)
    """What the network reads, as in the ``data`` of a job. An inference needs them; a training says
    its own."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for number, layer in enumerate(self.network.layers):
            if layer.name in self.fields:
                detail = f"{layer.name!r} names a layer and a data field; rename one"
                raise WrongAt("network", "layers", number, detail=detail)
        return self

    @cached_property
    def data(self) -> Data:
        """As a job that trained it would say it: fields, and the rest left out."""
        return Data.model_construct(train=Source(dataset="none"), fields=self.fields, batch_size=1)


Trained = TrainJob | UploadedNetwork
"""What is known of the network that a checkpoint has the weights of."""
_TRAINED: TypeAdapter[TrainJob | InferJob | UploadedNetwork] = TypeAdapter(
    JobSpec | UploadedNetwork
)


def parse_trained(body: bytes | str) -> Trained | None:
    """Read what made a checkpoint; None: a job that trains nothing.

    Raises:
        pydantic.ValidationError: with one entry per field that is wrong.
    """
    found = _TRAINED.validate_json(body)
    return None if isinstance(found, InferJob) else found
