"""Errors while a request is handled. Each becomes a problem document."""

from collections.abc import Sequence
from typing import Any, ClassVar

from glasshouse.errors.base import FieldProblem, GlasshouseError, code_of


class ServiceError(GlasshouseError):
    """The request failed."""

    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    hint: ClassVar[str | None] = None

    def __init__(
        self,
        detail: str | None = None,
        /,
        *,
        problems: Sequence[FieldProblem] = (),
        hint: str | None = None,
        retry_after_s: int | None = None,
        **context: Any,
    ) -> None:
        super().__init__(detail)
        self.problems = tuple(problems)
        self.advice = hint or type(self).hint
        self.retry_after_s = retry_after_s
        self.context = context
        """Further members of the problem document; JSON values only."""

    @property
    def code(self) -> str:
        """The stable public code: the class name in snake case."""
        return code_of(type(self).__name__)


class BadRequest(ServiceError):
    """The request cannot be parsed."""

    status = 400


class MalformedJson(BadRequest):
    """The body is not valid JSON."""


class InvalidCursor(BadRequest):
    """The cursor is invalid."""


class InvalidHeader(BadRequest):
    """A header has an invalid value."""


class Unauthorized(ServiceError):
    """The request needs a valid API key."""

    status = 401


class KeyMissing(Unauthorized):
    """The request has no API key."""

    hint = (
        "Send the header 'Authorization: Bearer gh_…'; 'glasshouse up' writes a key into "
        "runtime.json."
    )


class KeyInvalid(Unauthorized):
    """The API key is unknown, expired or revoked."""


class Forbidden(ServiceError):
    """The API key does not permit this."""

    status = 403


class ScopeTooSmall(Forbidden):
    """The API key does not have the required scope."""


class OriginNotAllowed(Forbidden):
    """Requests from this origin are not allowed."""


class NotFound(ServiceError):
    """The resource does not exist."""

    status = 404


class RouteNotFound(NotFound):
    """No route matches this path."""


class JobNotFound(NotFound):
    """No job has this ID."""


class DatasetNotFound(NotFound):
    """No dataset has this ID or name."""


class KeyNotFound(NotFound):
    """No API key has this ID."""


class CheckpointNotFound(NotFound):
    """No checkpoint has this ID."""


class LayerNotFound(NotFound):
    """The job's network has no layer or parameter with this name."""


class MetricNotFound(NotFound):
    """The job has not reported a metric with this name."""


class ArtifactNotFound(NotFound):
    """The job has no artifact with this name."""


class CommandNotFound(NotFound):
    """The job has no command with this ID."""


class ProbeNotFound(NotFound):
    """The job has no probe with this ID."""


class WorkerNotFound(NotFound):
    """No worker has this ID."""


class WebhookNotFound(NotFound):
    """No webhook has this ID."""


class ModelNotFound(NotFound):
    """No published model has this name or ID."""


class ModelVersionNotFound(NotFound):
    """The model has no version with this number or alias."""


class ModelNotServed(NotFound):
    """No serve job answers requests for this model."""

    hint = 'Submit a serve job: {"kind": "serve", "models": ["NAME@ALIAS"]}.'


class CatalogNotFound(NotFound):
    """The catalog has no section with this name."""


class StepNotCaptured(NotFound):
    """The tensor was not captured at this step."""


class MethodNotAllowed(ServiceError):
    """The path does not support this method."""

    status = 405


class NotAcceptable(ServiceError):
    """The requested response format is not supported."""

    status = 406


class RequestTimeout(ServiceError):
    """The request was not received completely in time."""

    status = 408
    retryable = True


class Conflict(ServiceError):
    """The state of the resource does not allow this."""

    status = 409


class WorkerRunning(Conflict):
    """The worker is running, or a job still holds its devices."""


class JobEnded(Conflict):
    """The job has ended."""


class JobNotEnded(Conflict):
    """The job has not ended; cancel it first."""


class JobNotPaused(Conflict):
    """The job is not paused."""


class CannotPause(Conflict):
    """The job cannot be paused."""


class CannotPredict(Conflict):
    """The job cannot answer requests for predictions."""


class DatasetInUse(Conflict):
    """A job that has not ended uses the dataset."""


class DatasetNotReady(Conflict):
    """The dataset is not ready."""


class CheckpointInUse(Conflict):
    """A job that has not ended, or a published model, uses the checkpoint."""


class ModelInUse(Conflict):
    """An alias names the version of the model, or a job that has not ended uses it."""


class CheckpointMissing(Conflict):
    """The job has no complete checkpoint."""


class IdempotencyKeyBusy(Conflict):
    """Another request with this idempotency key is still in progress."""

    retryable = True


class PreconditionFailed(ServiceError):
    """The resource has changed since the version in If-Match."""

    status = 412


class PayloadTooLarge(ServiceError):
    """The body is larger than the limit."""

    status = 413


class UnsupportedMedia(ServiceError):
    """The body has an unsupported media type."""

    status = 415


class HostNotAllowed(ServiceError):
    """The service does not accept requests for this host."""

    status = 421
    hint = "Add the host name to GLASSHOUSE_ALLOWED_HOSTS."


class Unprocessable(ServiceError):
    """The request is well-formed but invalid."""

    status = 422


class InvalidRequest(Unprocessable):
    """A parameter or field of the request is invalid."""


class InvalidSpec(Unprocessable):
    """The job spec is invalid."""


class InvalidDataset(Unprocessable):
    """The file cannot be read as a dataset of this format."""


class InvalidCheckpoint(Unprocessable):
    """The file cannot be read as the weights of a network."""


class IdempotencyKeyReused(Unprocessable):
    """This idempotency key was used with a different body."""


class DeviceUnavailable(Unprocessable):
    """No worker has a healthy device that matches the request."""


class UnsafeFormat(Unprocessable):
    """Files of this format can run code when opened, so they are rejected."""

    hint = (
        "Save tensors as safetensors or .npz, and tables as .csv. Open such a file only where you "
        "would run a program of its author."
    )


class TooManyRequests(ServiceError):
    """Too many requests or open streams."""

    status = 429
    retryable = True


class QuotaExceeded(TooManyRequests):
    """A quota is exceeded."""


class TooManyInvalidKeys(TooManyRequests):
    """This address sent too many requests with unknown API keys."""


class QueueFull(TooManyRequests):
    """As many requests wait for the model as its queue takes."""


class HeadersTooLarge(ServiceError):
    """The request headers are larger than the limit."""

    status = 431


class InternalError(ServiceError):
    """An unexpected error occurred in the service."""


class PredictionFailed(ServiceError):
    """The network failed on this request."""


class PredictionTimeout(ServiceError):
    """The model did not answer in time."""

    status = 504
    retryable = True


class Unavailable(ServiceError):
    """The service is temporarily unavailable; try again."""

    status = 503
    retryable = True


class ReplicaUnavailable(Unavailable):
    """No replica of the model can be reached."""


class PlannerUnavailable(Unavailable):
    """The planner, which checks specs, did not respond in time."""


class DatabaseUnavailable(Unavailable):
    """The database is unavailable."""


class TransactionConflict(Unavailable):
    """A concurrent transaction conflicted with this one; nothing was changed."""


class StorageFull(Unavailable):
    """The disk is full."""
