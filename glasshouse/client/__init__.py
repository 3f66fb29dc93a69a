"""The Python client. It depends only on the public HTTP API.

Modules that do I/O are written once, as async code in ``aio``. Those in ``blocking`` are generated
from them. The other folders are shared by both clients and make no requests.
"""

from glasshouse.client.blocking.client import Client
from glasshouse.client.blocking.control import Command
from glasshouse.client.blocking.job import Job
from glasshouse.client.blocking.layers import Layer
from glasshouse.client.blocking.models import Model, ModelVersion
from glasshouse.client.blocking.probes import Probe
from glasshouse.client.blocking.records import Checkpoint, Dataset, Record
from glasshouse.client.blocking.stream import EventStream
from glasshouse.client.data.predictions import JobPrediction, Prediction
from glasshouse.client.data.series import Series, SeriesTable
from glasshouse.client.data.statistics import History, LayerStats
from glasshouse.client.data.tensors import as_torch
from glasshouse.client.monitoring.callbacks import Callback
from glasshouse.client.monitoring.events import OtherEvent
from glasshouse.client.monitoring.explanations import Explanation

__all__ = [
    "Callback",
    "Checkpoint",
    "Client",
    "Command",
    "Dataset",
    "EventStream",
    "Explanation",
    "History",
    "Job",
    "JobPrediction",
    "Layer",
    "LayerStats",
    "Model",
    "ModelVersion",
    "OtherEvent",
    "Prediction",
    "Probe",
    "Record",
    "Series",
    "SeriesTable",
    "as_torch",
]
