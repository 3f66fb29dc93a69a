"""The client: speaks the public API over HTTP, and knows nothing else of the service."""

from glasshouse.client.client import Client
from glasshouse.client.control import Command
from glasshouse.client.job import Job
from glasshouse.client.layers import History, Layer, LayerStats
from glasshouse.client.probes import Probe
from glasshouse.client.records import Checkpoint, Dataset, Record
from glasshouse.client.series import Series
from glasshouse.client.stream import EventStream, OtherEvent

__all__ = [
    "Checkpoint",
    "Client",
    "Command",
    "Dataset",
    "EventStream",
    "History",
    "Job",
    "Layer",
    "LayerStats",
    "OtherEvent",
    "Probe",
    "Record",
    "Series",
]
