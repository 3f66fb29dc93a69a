"""The Python client. It depends only on the public HTTP API.

Modules that do I/O are written once, as async code in ``aio``. The blocking modules of the same
names in this folder are generated from them.
"""

from glasshouse.client.callbacks import Callback
from glasshouse.client.client import Client
from glasshouse.client.control import Command
from glasshouse.client.events import OtherEvent
from glasshouse.client.explanations import Explanation
from glasshouse.client.job import Job
from glasshouse.client.layers import Layer
from glasshouse.client.probes import Probe
from glasshouse.client.records import Checkpoint, Dataset, Record
from glasshouse.client.series import Series, SeriesTable
from glasshouse.client.statistics import History, LayerStats
from glasshouse.client.stream import EventStream
from glasshouse.client.tensors import as_torch

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
    "Layer",
    "LayerStats",
    "OtherEvent",
    "Probe",
    "Record",
    "Series",
    "SeriesTable",
    "as_torch",
]
