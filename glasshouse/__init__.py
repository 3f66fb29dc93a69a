"""A self-hosted training service that you can see into: the words, the client, the command line.

``import glasshouse`` is light: every name below is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glasshouse import spec
    from glasshouse.client import (
        Callback,
        Checkpoint,
        Client,
        Command,
        Dataset,
        EventStream,
        Explanation,
        Job,
        JobPrediction,
        Layer,
        Model,
        ModelVersion,
        Prediction,
        Probe,
        Series,
        SeriesTable,
        as_torch,
    )
    from glasshouse.client.aio import (
        AsyncCheckpoint,
        AsyncClient,
        AsyncCommand,
        AsyncDataset,
        AsyncEventStream,
        AsyncJob,
        AsyncLayer,
        AsyncModel,
        AsyncModelVersion,
        AsyncProbe,
    )
    from glasshouse.errors import (
        APIConnectionError,
        APIError,
        APIStatusError,
        APITimeoutError,
        AuthenticationError,
        BadGatewayError,
        BadRequestError,
        CannotTrace,
        ConflictError,
        GatewayTimeoutError,
        GlasshouseError,
        HeadersTooLargeError,
        InternalServerError,
        JobCancelled,
        JobFailed,
        MethodNotAllowedError,
        MisdirectedRequestError,
        NotAcceptableError,
        NotFoundError,
        PayloadTooLargeError,
        PermissionDeniedError,
        PreconditionFailedError,
        RateLimitError,
        RequestTimeoutError,
        ServiceUnavailableError,
        UnprocessableEntityError,
        UnsupportedMediaError,
        WaitTimeout,
    )

__version__ = "0.1.0"

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIStatusError",
    "APITimeoutError",
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
    "AuthenticationError",
    "BadGatewayError",
    "BadRequestError",
    "Callback",
    "CannotTrace",
    "Checkpoint",
    "Client",
    "Command",
    "ConflictError",
    "Dataset",
    "EventStream",
    "Explanation",
    "GatewayTimeoutError",
    "GlasshouseError",
    "HeadersTooLargeError",
    "InternalServerError",
    "Job",
    "JobCancelled",
    "JobFailed",
    "JobPrediction",
    "Layer",
    "MethodNotAllowedError",
    "MisdirectedRequestError",
    "Model",
    "ModelVersion",
    "NotAcceptableError",
    "NotFoundError",
    "PayloadTooLargeError",
    "PermissionDeniedError",
    "PreconditionFailedError",
    "Prediction",
    "Probe",
    "RateLimitError",
    "RequestTimeoutError",
    "Series",
    "SeriesTable",
    "ServiceUnavailableError",
    "UnprocessableEntityError",
    "UnsupportedMediaError",
    "WaitTimeout",
    "as_torch",
    "spec",
]

_CLIENT = {
    "Callback",
    "Checkpoint",
    "Client",
    "Command",
    "Dataset",
    "EventStream",
    "Explanation",
    "Job",
    "JobPrediction",
    "Layer",
    "Model",
    "ModelVersion",
    "Prediction",
    "Probe",
    "Series",
    "SeriesTable",
    "as_torch",
}


def __getattr__(name: str) -> Any:
    if name == "spec":
        return import_module("glasshouse.spec")
    if name not in __all__:
        raise AttributeError(f"module 'glasshouse' has no attribute {name!r}")
    value = getattr(import_module(_home(name)), name)
    globals()[name] = value
    return value


def _home(name: str) -> str:
    if name.startswith("Async"):
        return "glasshouse.client.aio"
    return "glasshouse.client" if name in _CLIENT else "glasshouse.errors"


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
