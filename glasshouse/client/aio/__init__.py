"""The async client. The blocking client is generated from it by ``.ci/twins.py``."""

from glasshouse.client.aio.client import AsyncClient
from glasshouse.client.aio.control import AsyncCommand
from glasshouse.client.aio.job import AsyncJob
from glasshouse.client.aio.layers import AsyncLayer
from glasshouse.client.aio.models import AsyncModel, AsyncModelVersion
from glasshouse.client.aio.probes import AsyncProbe
from glasshouse.client.aio.records import AsyncCheckpoint, AsyncDataset, AsyncRecord
from glasshouse.client.aio.stream import AsyncEventStream

__all__ = [
    "AsyncCheckpoint",
    "AsyncClient",
    "AsyncCommand",
    "AsyncDataset",
    "AsyncEventStream",
    "AsyncJob",
    "AsyncLayer",
    "AsyncModel",
    "AsyncModelVersion",
    "AsyncProbe",
    "AsyncRecord",
]
