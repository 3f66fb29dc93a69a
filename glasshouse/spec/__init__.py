"""The models of job specs: strict, immutable, and validated by pydantic alone.

This package does not depend on torch, SQL or HTTP.
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
from glasshouse.spec.jobs import KINDS, AnyJob, JobSpec, parse_job
from glasshouse.spec.jobs.diagnose_job import DiagnoseJob
from glasshouse.spec.jobs.evaluate_job import EvaluateData, EvaluateJob
from glasshouse.spec.jobs.infer_job import Flatten, InferData, InferJob
from glasshouse.spec.jobs.job import Devices, Retry
from glasshouse.spec.jobs.request_log import RequestLog
from glasshouse.spec.jobs.serve_job import (
    Drift,
    OtherVersion,
    Replicas,
    ServedModel,
    ServeJob,
)
from glasshouse.spec.jobs.train_job import TrainJob
from glasshouse.spec.metrics import Metric
from glasshouse.spec.network import Graph, Layer, ParameterInit, PerParameter
from glasshouse.spec.parallel import Parallel
from glasshouse.spec.preprocessing import (
    CbowWindows,
    Fill,
    LanguageModelWindows,
    Normalize,
    Vocabulary,
    Windows,
)
from glasshouse.spec.presets import Preset
from glasshouse.spec.probes import Form, Probe
from glasshouse.spec.strict import Args, Spec
from glasshouse.spec.tensor_kinds import TensorKind
from glasshouse.spec.training import (
    Average,
    Checkpoint,
    Early,
    Evaluate,
    GradScaler,
    Init,
    KeepBest,
    Loss,
    Optimizer,
    Scheduler,
    SparseOptimizer,
    Stop,
)
from glasshouse.spec.uploads import Trained, UploadedNetwork, parse_trained

__all__ = [
    "KINDS",
    "Allocator",
    "AnyJob",
    "Args",
    "Average",
    "BucketByLength",
    "CbowWindows",
    "Checkpoint",
    "Data",
    "DenseField",
    "DenseSequenceField",
    "Devices",
    "DiagnoseJob",
    "Drift",
    "Early",
    "Evaluate",
    "EvaluateData",
    "EvaluateJob",
    "Field",
    "Fill",
    "Flatten",
    "Form",
    "GradClip",
    "GradScaler",
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
    "OtherVersion",
    "OutputGradClip",
    "Parallel",
    "ParameterInit",
    "PerParameter",
    "Preset",
    "Probe",
    "RaggedField",
    "Replicas",
    "RequestLog",
    "Retry",
    "Scheduler",
    "SequenceField",
    "Sequences",
    "ServeJob",
    "ServedModel",
    "Shuffle",
    "Source",
    "SparseBinaryField",
    "SparseField",
    "SparseFloatField",
    "SparseOptimizer",
    "Spec",
    "Stop",
    "TensorKind",
    "TrainJob",
    "Trained",
    "UploadedNetwork",
    "Vocabulary",
    "Windows",
    "parse_job",
    "parse_trained",
]
