"""The spec of an inference job."""

from typing import Literal, Self

from pydantic import Field as Constraint
from pydantic import (
    model_validator,
)

from glasshouse.spec.data import Field
from glasshouse.spec.jobs.job import Job, Retry, with_processes
from glasshouse.spec.network import Input
from glasshouse.spec.parallel import Parallel
from glasshouse.spec.strict import (
    JsonData,
    Name,
    Spec,
    WrongAt,
    check_exactly_one,
)


class InferData(Spec):
    """Rows of a dataset to run through the network, in their stored order."""

    dataset: str = Constraint(min_length=1, max_length=500)
    """The id (``ds_…``) or name of a dataset."""
    split: str = Constraint(default="all", min_length=1, max_length=64)
    """A split of the dataset. Example: ``"test"``."""
    fields: dict[Name, Field] | None = Constraint(default=None, min_length=1, max_length=1000)
    """The inputs of the network, by name. Default: the fields of the job that trained the
    checkpoint."""
    batch_size: int = Constraint(default=256, ge=1, le=1_000_000)
    """Number of rows per batch."""
    on_bad_row: Literal["fail", "drop"] = "fail"
    """What to do with rows that do not fit their fields: a missing value without ``fill``, or an
    index out of range. ``fail``: the job fails and names the first. ``drop``: the results have the
    other rows, with their numbers as ``row``, and the artifact ``bad_rows.jsonl`` lists each
    dropped row with the reason."""


class Flatten(Spec):
    """Joins the results of all layers into one tensor per field.

    Each result is first flattened to [rows, values].
    """

    axis: Literal[0, 1]
    """Axis of the concatenation. ``0``: vertically, which requires equal widths. ``1``:
    horizontally, which requires equal numbers of rows."""


class InferJob(Job):
    """Runs a trained network and returns the outputs of any of its layers.

    Set exactly one of ``checkpoint`` and ``job``, and exactly one of ``data`` and ``inputs``.
    """

    kind: Literal["infer"]
    """Selects an inference job."""
    checkpoint: str | None = Constraint(default=None, min_length=1, max_length=500)
    """The id of the checkpoint to use, or a version of a published model: ``mnist``,
    ``mnist@production``, ``mnist:3``. Example: ``"ckpt_019a7c4f2b6e"``."""
    job: str | None = Constraint(default=None, min_length=1, max_length=64)
    """The id of a training job, whose newest complete checkpoint is used. Example:
    ``"job_019a7c4f2b6e"``."""
    data: InferData | None = None
    """Rows of a dataset. Example: ``{"dataset": "digits", "split": "test"}``."""
    inputs: dict[Name, JsonData] | None = Constraint(default=None, min_length=1, max_length=1000)
    """Values of the network's input fields by name, each a nested list whose first axis is the
    rows. Example: ``{"image": [[0.0, 0.5, 1.0]]}``."""
    outputs: tuple[Input, ...] | None = Constraint(default=None, min_length=1, max_length=1000)
    """Layers to return. Default: the outputs of the network. Example: ``["conv1", "fc"]``."""
    fields: tuple[Literal["value", "id", "prob", "top_k"], ...] | None = Constraint(
        default=None, min_length=1, max_length=4
    )
    """What to return for each layer. ``value``: the output. ``id``: the index of its largest entry
    along the last axis. ``prob``: the softmax probability of that entry. ``top_k``: the indices of
    the largest entries in descending order, and as ``top_k_prob`` their probabilities. Default:
    ``value``, with ``id`` and ``prob`` for scores that a loss compared with classes in training,
    and ``top_k`` if that is set. Example: ``["id", "prob"]``."""
    top_k: int | None = Constraint(default=None, ge=1, le=10_000)
    """Number of entries of the field ``top_k``, at most the size of the last axis. Default: 5.
    Example: ``3``."""
    format: Literal["safetensors", "npz", "jsonl", "csv", "parquet"] = "safetensors"
    """Format of the artifact ``outputs.<format>``. ``safetensors``, ``npz``: a tensor for each
    layer and field, ``<layer>/<field>``. ``jsonl``: an object for each row. ``csv``: a line for
    each row, with a column for each number. ``parquet``: a row for each row, with nested lists.
    Example: ``"parquet"``."""
    flatten: Literal[False] | Flatten = False
    """``false``: one tensor per layer and field. Otherwise the layers are joined into one tensor
    per field. Example: ``{"axis": 1}``."""
    sequence_layout: Literal["padded", "packed"] = "padded"
    """Layout of outputs with a value per step. ``padded``: ``[rows, longest, …]``, with zeros after
    the end of each row. ``packed``: ``[all steps, …]``, the rows concatenated. ``<layer>/lengths``
    has the number of steps of each row in both."""
    parallel: Parallel = Parallel(strategy="none")
    """Several processes that divide the rows among them; each has the whole network. Default: one
    process. Example: ``{"strategy": "data", "processes": 2}``."""
    retry: Retry = Retry()
    """Automatic restarts. Outputs that are stored are not computed again."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        check_exactly_one(self, "checkpoint", "job")
        check_exactly_one(self, "data", "inputs")
        if self.top_k is not None and self.fields is not None and "top_k" not in self.fields:
            detail = f"top_k ({self.top_k}) is the size of a field that fields does not name: add"
            raise WrongAt("top_k", detail=f'{detail} "top_k" to fields, or remove top_k')
        self._check_format()
        return self

    def _check_format(self) -> None:
        if self.format in ("safetensors", "npz"):
            return
        detail = f"{self.format} has one entry for each row of the data, and"
        fix = "set format to safetensors or npz, or remove"
        if self.flatten is not False and self.flatten.axis == 0:
            detail += " flatten with axis 0 joins the rows of all layers"
            raise WrongAt("flatten", "axis", detail=f"{detail}: {fix} flatten")
        if self.flatten is not False:
            detail += " flatten joins tensors: its layers are columns beside each other anyway"
            raise WrongAt("flatten", detail=f"{detail}: {fix} flatten")
        if self.sequence_layout == "packed":
            detail += " each row has its own steps in it: packed would change nothing"
            raise WrongAt("sequence_layout", detail=f"{detail}: {fix} sequence_layout")

    @model_validator(mode="after")
    def _check_processes(self) -> Self:
        parallel = self.parallel
        if parallel.strategy not in ("none", "data", "auto") or parallel.has_parts:
            detail = (
                f"the processes of an infer job divide the rows, and {parallel.strategy} divides"
            )
            raise WrongAt("parallel", detail=f"{detail} the network: set strategy to data")
        for name in ("schedule", "micro_batches", "cpu_offload"):
            if value := getattr(parallel, name):
                shown = "true" if value is True else value
                detail = f"{name} ({shown}) is that of a training: remove {name}"
                raise WrongAt("parallel", name, detail=detail)
        counted = with_processes(parallel, self.devices)
        if counted.processes not in (None, 1) and self.data is None:
            detail = f"{counted.processes} processes divide the rows of a dataset, and the rows are"
            raise WrongAt("parallel", "processes", detail=f"{detail} in inputs: remove parallel")
        object.__setattr__(self, "parallel", counted)  # frozen from here on
        return self

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.parallel.processes or 1
