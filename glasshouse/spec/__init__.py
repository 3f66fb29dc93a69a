"""The words of a job: what a user writes, what is stored, what runs. One closed, frozen value.

Knows pydantic and nothing else: no torch, no SQL, no HTTP.
"""

from glasshouse.spec.clipping import GradClip, OutputGradClip
from glasshouse.spec.data import (
    BucketByLength,
    Data,
    DenseField,
    DenseSequenceField,
    Field,
    IntegerField,
    IntegerSequenceField,
    RaggedField,
    SequenceField,
    Sequences,
    Shuffle,
    Source,
    SparseBinaryField,
    SparseField,
    SparseFloatField,
)
from glasshouse.spec.guards import Allocator, Guards, MemoryGuard, NonfiniteGuard
from glasshouse.spec.jobs import (
    Devices,
    Flatten,
    InferData,
    InferJob,
    JobSpec,
    Retry,
    TrainJob,
    parse_job,
)
from glasshouse.spec.metrics import Metric
from glasshouse.spec.network import Graph, Layer, ParameterInit, PerParameter
from glasshouse.spec.preparing import (
    CbowWindows,
    Fill,
    LanguageModelWindows,
    Normalize,
    Vocabulary,
    Windows,
)
from glasshouse.spec.presets import Preset
from glasshouse.spec.probes import Form, Probe, TensorKind
from glasshouse.spec.strict import Args, Spec
from glasshouse.spec.training import (
    Average,
    Checkpoint,
    Early,
    Evaluate,
    Init,
    KeepBest,
    Loss,
    Optimizer,
    Scheduler,
    Stop,
)

__all__ = [
    "Allocator",
    "Args",
    "Average",
    "BucketByLength",
    "CbowWindows",
    "Checkpoint",
    "Data",
    "DenseField",
    "DenseSequenceField",
    "Devices",
    "Early",
    "Evaluate",
    "Field",
    "Fill",
    "Flatten",
    "Form",
    "GradClip",
    "Graph",
    "Guards",
    "InferData",
    "InferJob",
    "Init",
    "IntegerField",
    "IntegerSequenceField",
    "JobSpec",
    "KeepBest",
    "LanguageModelWindows",
    "Layer",
    "Loss",
    "MemoryGuard",
    "Metric",
    "NonfiniteGuard",
    "Normalize",
    "Optimizer",
    "OutputGradClip",
    "ParameterInit",
    "PerParameter",
    "Preset",
    "Probe",
    "RaggedField",
    "Retry",
    "Scheduler",
    "SequenceField",
    "Sequences",
    "Shuffle",
    "Source",
    "SparseBinaryField",
    "SparseField",
    "SparseFloatField",
    "Spec",
    "Stop",
    "TensorKind",
    "TrainJob",
    "Vocabulary",
    "Windows",
    "parse_job",
]
