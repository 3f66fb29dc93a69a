"""All error classes. Does not depend on HTTP frameworks, SQL or torch.

GlasshouseError
├── ServiceError                 raised while handling a request; becomes a problem document
│   ├── BadRequest          400  MalformedJson, InvalidCursor, InvalidHeader
│   ├── Unauthorized        401  KeyMissing, KeyInvalid
│   ├── Forbidden           403  ScopeTooSmall, OriginNotAllowed
│   ├── NotFound            404  RouteNotFound, JobNotFound, DatasetNotFound, KeyNotFound,
│   │                            CheckpointNotFound, LayerNotFound, MetricNotFound,
│   │                            ArtifactNotFound, CommandNotFound, ProbeNotFound,
│   │                            WorkerNotFound, CatalogNotFound, StepNotCaptured,
│   │                            WebhookNotFound
│   ├── MethodNotAllowed    405
│   ├── NotAcceptable       406
│   ├── RequestTimeout      408
│   ├── Conflict            409  JobEnded, JobNotEnded, JobNotPaused, CannotPause, WorkerRunning,
│   │                            DatasetInUse, DatasetNotReady, CheckpointInUse,
│   │                            IdempotencyKeyBusy,
│   │                            CheckpointMissing
│   ├── PreconditionFailed  412
│   ├── PayloadTooLarge     413
│   ├── UnsupportedMedia    415
│   ├── HostNotAllowed      421
│   ├── Unprocessable       422  InvalidRequest, InvalidSpec, InvalidDataset,
│   │                            InvalidCheckpoint, IdempotencyKeyReused, DeviceUnavailable,
│   │                            UnsafeFormat
│   ├── TooManyRequests     429  QuotaExceeded, TooManyInvalidKeys
│   ├── HeadersTooLarge     431
│   ├── InternalError       500
│   └── Unavailable         503  PlannerUnavailable, DatabaseUnavailable, StorageFull,
│                                TransactionConflict
├── RunFailure                   ends a job; stored on it as its ``error``
│   └── SpecFailed, DataFailed, NonFinite ── TooManySkipped, OutOfMemory, DeviceFailed,
│       Unkillable, WorkerLost, RankDied, CrashLoop, Stalled, Timeout, CheckpointMismatch,
│       EngineFailed, StorageFailed ── DiskFull, CheckpointDamaged
├── APIError                     raised by the client for an error answer, one class per status
│   ├── APIConnectionError ── APITimeoutError
│   └── APIStatusError           one for each status that the service or a proxy answers with
│       ├── BadRequestError      400 and any other 4xx ── MethodNotAllowedError, NotAcceptableError,
│       │                        RequestTimeoutError, MisdirectedRequestError, HeadersTooLargeError
│       ├── AuthenticationError, PermissionDeniedError, NotFoundError, ConflictError,
│       │   PreconditionFailedError, PayloadTooLargeError, UnsupportedMediaError,
│       │   UnprocessableEntityError, RateLimitError, ServiceUnavailableError
│       └── InternalServerError  500 and any other 5xx ── BadGatewayError, GatewayTimeoutError
├── CannotTrace                  raised by the client: a module cannot be expressed as a graph
├── JobFailed                    raised by the client when a job that it waits for failed
├── JobCancelled                 … was canceled
└── WaitTimeout                  … did not end in time
"""

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar


class GlasshouseError(Exception):
    """Something failed."""

    def __init__(self, detail: str | None = None, /) -> None:
        self.detail = detail or (type(self).__doc__ or "").strip().splitlines()[0]
        super().__init__(self.detail)


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """What is wrong with one field of a request."""

    pointer: str
    """JSON Pointer into the request, e.g. ``/network/layers/3/args/out_channels``."""
    detail: str
    """What is wrong, with the value, and what to change."""
    code: str

    def as_dict(self) -> dict[str, str]:
        """The entry of a problem document's ``errors``."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.pointer}: {self.detail}" if self.pointer else self.detail


def _code(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


# --- while a request is answered -------------------------------------------------------------


class ServiceError(GlasshouseError):
    """The service failed in a way it did not expect."""

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
        return _code(type(self).__name__)


class BadRequest(ServiceError):
    """The request cannot be read."""

    status = 400


class MalformedJson(BadRequest):
    """The body is not JSON."""


class InvalidCursor(BadRequest):
    """The cursor is not one that this service made."""


class InvalidHeader(BadRequest):
    """A header has a value that cannot be read."""


class Unauthorized(ServiceError):
    """The request needs a key."""

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
    """The key does not allow this."""

    status = 403


class ScopeTooSmall(Forbidden):
    """The key lacks the scope that this needs."""


class OriginNotAllowed(Forbidden):
    """A page of another origin may not call this service."""


class NotFound(ServiceError):
    """There is no such thing."""

    status = 404


class RouteNotFound(NotFound):
    """Nothing lives at this path."""


class JobNotFound(NotFound):
    """No job has this id."""


class DatasetNotFound(NotFound):
    """No dataset has this id."""


class KeyNotFound(NotFound):
    """No API key has this id."""


class CheckpointNotFound(NotFound):
    """No checkpoint has this id."""


class LayerNotFound(NotFound):
    """The job's network has no layer or parameter of this name."""


class MetricNotFound(NotFound):
    """The job has reported no metric of this name."""


class ArtifactNotFound(NotFound):
    """The job has no artifact of this name."""


class CommandNotFound(NotFound):
    """No command has this id."""


class ProbeNotFound(NotFound):
    """No probe has this id."""


class WorkerNotFound(NotFound):
    """No worker has this id."""


class WebhookNotFound(NotFound):
    """No webhook has this id."""


class CatalogNotFound(NotFound):
    """The catalog has no such section."""


class StepNotCaptured(NotFound):
    """The tensor was not captured at this step."""


class MethodNotAllowed(ServiceError):
    """This path does not take this method."""

    status = 405


class NotAcceptable(ServiceError):
    """The answer cannot be given in the format asked for."""

    status = 406


class RequestTimeout(ServiceError):
    """The rest of the request did not come in time."""

    status = 408
    retryable = True


class Conflict(ServiceError):
    """The thing is in a state that does not allow this."""

    status = 409


class WorkerRunning(Conflict):
    """The worker runs, or a job still has its devices."""


class JobEnded(Conflict):
    """The job has ended."""


class JobNotEnded(Conflict):
    """The job has not ended; cancel it first."""


class JobNotPaused(Conflict):
    """The job is not paused."""


class CannotPause(Conflict):
    """The job cannot be paused."""


class DatasetInUse(Conflict):
    """A job that has not ended uses the dataset."""


class DatasetNotReady(Conflict):
    """The dataset is not ready to be used."""


class CheckpointInUse(Conflict):
    """A job that has not ended uses the checkpoint."""


class CheckpointMissing(Conflict):
    """The job has no complete checkpoint."""


class IdempotencyKeyBusy(Conflict):
    """A request with this idempotency key is still being answered."""

    retryable = True


class PreconditionFailed(ServiceError):
    """The thing has changed since the version that If-Match names."""

    status = 412


class PayloadTooLarge(ServiceError):
    """The body is larger than the limit."""

    status = 413


class UnsupportedMedia(ServiceError):
    """The body has a media type that this path does not take."""

    status = 415


class HostNotAllowed(ServiceError):
    """The Host header names a host that this service does not answer for."""

    status = 421
    hint = "Add the host name to GLASSHOUSE_ALLOWED_HOSTS."


class Unprocessable(ServiceError):
    """The request can be read but not be done."""

    status = 422


class InvalidRequest(Unprocessable):
    """A parameter or field of the request is wrong."""


class InvalidSpec(Unprocessable):
    """The job spec cannot be run as it is written."""


class InvalidDataset(Unprocessable):
    """The file cannot be read as a dataset of this format."""


class InvalidCheckpoint(Unprocessable):
    """The file cannot be read as the weights of a network."""


class IdempotencyKeyReused(Unprocessable):
    """This idempotency key was used with another body."""


class DeviceUnavailable(Unprocessable):
    """No worker has a healthy device like the one asked for."""


class UnsafeFormat(Unprocessable):
    """A file of this format runs code when it is opened; it is not taken."""

    hint = (
        "Save tensors as safetensors or .npz, tables as .csv; open a file like this only where you "
        "would run a program of its author."
    )


class TooManyRequests(ServiceError):
    """Too many requests."""

    status = 429
    retryable = True


class QuotaExceeded(TooManyRequests):
    """A quota is used up."""


class TooManyInvalidKeys(TooManyRequests):
    """Too many requests with unknown API keys came from this address."""


class HeadersTooLarge(ServiceError):
    """The head of the request is larger than the limit."""

    status = 431


class InternalError(ServiceError):
    """The service failed in a way it did not expect."""


class Unavailable(ServiceError):
    """The service cannot answer this now; try again."""

    status = 503
    retryable = True


class PlannerUnavailable(Unavailable):
    """The process that checks specs did not answer in time."""


class DatabaseUnavailable(Unavailable):
    """The database does not answer."""


class TransactionConflict(Unavailable):
    """Another transaction was in the way; nothing was changed."""


class StorageFull(Unavailable):
    """The disk is full."""


# --- ends a job ------------------------------------------------------------------------------


class RunFailure(GlasshouseError):
    """The job failed."""

    category: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    hint: ClassVar[str | None] = None

    def __init__(
        self,
        detail: str | None = None,
        /,
        *,
        layer: str | None = None,
        step: int | None = None,
        rank: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.layer = layer
        self.step = step
        self.rank = rank
        self.advice = hint or type(self).hint

    @property
    def code(self) -> str:
        """The stable public code: the class name in snake case."""
        return _code(type(self).__name__)

    def as_dict(self) -> dict[str, Any]:
        """The job's ``error``, without its ``log_tail``."""
        return {
            "code": self.code,
            "message": self.detail,
            "category": self.category,
            "retryable": self.retryable,
            "rank": self.rank,
            "layer": self.layer,
            "step": self.step,
            "hint": self.advice,
        }


class SpecFailed(RunFailure):
    """The network or one of its parts cannot run as specified."""

    category = "spec"


class CheckpointMismatch(SpecFailed):
    """The checkpoint is of another network, optimizer or data than the job has."""


class DataFailed(RunFailure):
    """The data does not fit its declaration."""

    category = "data"


class NonFinite(RunFailure):
    """Numbers were no longer finite, and the job failed by it."""

    category = "nonfinite"
    OF_RATE: ClassVar[str] = (
        "Lower the learning rate or set grad_clip. A probe with on: nonfinite shows the last steps "
        "before the first bad one."
    )
    hint = OF_RATE
    OF_DATA: ClassVar[str] = (
        "The data has values that are not finite: correct those rows (bad_samples of the finding), "
        'or set fill of the field, or data.on_bad_row to "drop".'
    )
    OF_GROWTH: ClassVar[str] = (
        "The gradients grew over the last steps: lower the learning rate or set grad_clip."
    )
    OF_FUNCTION: ClassVar[str] = (
        "Lower the learning rate or set grad_clip, unless the layer takes a logarithm, a root or a "
        "quotient at zero: then add a small constant to its argument."
    )
    OF_SCALE: ClassVar[str] = (
        "Gradients overflow float16 however little the loss is scaled: set precision to bfloat16, "
        "or make the loss smaller."
    )
    LARGE: ClassVar[float] = 1e4
    """A field that reaches this may be what makes numbers overflow."""

    @staticmethod
    def of_field(name: str, absmax: float) -> str:
        """The cause where a field of the data has values that are too large."""
        return f"The field {name!r} reaches {absmax:.3g}: scale or normalize it."

    def __init__(
        self,
        detail: str | None = None,
        /,
        *,
        layer: str | None = None,
        step: int | None = None,
        found: Mapping[str, Any] | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(detail, layer=layer, step=step, hint=hint)
        self.found = None if found is None else dict(found)
        """Where they first were not: ``step``, ``metric``, ``layer``, ``kind``, ``phase``, and the
        rows of the batch; None: nobody looked."""

    def as_dict(self) -> dict[str, Any]:
        """The job's ``error``, with where it was if that is known."""
        told = super().as_dict()
        return told if self.found is None else {**told, "nonfinite": self.found}


class TooManySkipped(NonFinite):
    """Too many steps in a row had NaN or Inf, and were skipped."""

    hint = (
        "The parameters are those of the last step that was not skipped, so the next steps would "
        "be skipped too: lower the learning rate, or check the data; the finding names the layer."
    )


class OutOfMemory(RunFailure):
    """Memory ran out."""

    category = "out_of_memory"
    hint = "Lower data.batch_size, or choose a device with more memory."

    def __init__(
        self,
        detail: str | None = None,
        /,
        *,
        memory: Mapping[str, Any] | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(detail, rank=rank)
        self.memory = dict(memory or {})
        """``where`` (device or host), ``requested_bytes``, ``free_bytes``, ``peak_bytes``,
        ``limit_bytes``; those that are known."""

    def as_dict(self) -> dict[str, Any]:
        """The job's ``error``, with what is known of the memory."""
        return {**super().as_dict(), "memory": self.memory}


class DeviceFailed(RunFailure):
    """The device failed."""

    category = "device"
    retryable = True


class Unkillable(RunFailure):
    """The process did not end even when it was killed."""

    category = "device"
    hint = (
        "It waits inside the kernel, mostly for a device or a disk. Its devices go to nobody until "
        "it is gone; if it stays, start the machine again."
    )


class WorkerLost(RunFailure):
    """The worker that ran the job was lost, again and again."""

    category = "worker_lost"
    retryable = True
    hint = "Look at the worker's log and at the memory of its host."


class RankDied(RunFailure):
    """A training process ended without saying why."""

    category = "internal"
    retryable = True


class CrashLoop(RunFailure):
    """The training process crashed again and again without progress."""

    category = "internal"
    hint = (
        "Native code crashed: the log's last lines may name it. Try without what is unusual in the "
        "spec, or on another kind of device."
    )


class Stalled(RunFailure):
    """The job made no progress for too long."""

    category = "timeout"
    retryable = True
    hint = (
        "The event stalled says at which step. A step that may take longer: raise stall_timeout_s."
    )


class Timeout(RunFailure):
    """The job took longer than its timeout_s."""

    category = "timeout"
    hint = "Raise timeout_s. The checkpoints that it made are kept."


class StorageFailed(RunFailure):
    """A file could not be written or read."""

    category = "storage"
    retryable = True


class DiskFull(StorageFailed):
    """The disk of the worker is full."""

    hint = "Make room: delete ended jobs and datasets that nobody needs."


class CheckpointDamaged(StorageFailed):
    """The checkpoint is not what was written: something is missing, altered, or not part of it."""


class EngineFailed(RunFailure):
    """The engine failed in a way it did not expect."""

    category = "internal"


# --- raised by the client --------------------------------------------------------------------


class APIError(GlasshouseError):
    """The service is unreachable or responded with an error."""


class APIConnectionError(APIError):
    """The service is unreachable."""


class APITimeoutError(APIConnectionError):
    """The service did not respond in time."""


def _items(problem: dict[str, Any]) -> list[dict[str, Any]]:
    return problem.get("errors") or []


class APIStatusError(APIError):
    """The service responded with an error status."""

    status: ClassVar[int | None] = None

    def __init__(self, detail: str, *, status_code: int, problem: dict[str, Any]) -> None:
        lines = [detail]
        places = [
            str(FieldProblem(item.get("pointer", ""), item.get("detail", ""), ""))
            for item in _items(problem)
        ]
        lines.extend(f"  {place}" for place in places if place != detail)
        if problem.get("hint"):
            lines.append(f"  hint: {problem['hint']}")
        super().__init__("\n".join(lines))
        self.status_code = status_code
        self.problem = problem
        """The whole problem document."""
        self.retry_after_s: float | None = None
        """Seconds to wait before the next try, from ``Retry-After``; None if it is not set."""

    @property
    def code(self) -> str | None:
        """The problem's stable code."""
        return self.problem.get("code")

    @property
    def request_id(self) -> str | None:
        """The id to quote when asking for help."""
        return self.problem.get("request_id")

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return bool(self.problem.get("retryable"))

    @staticmethod
    def of(status_code: int, problem: dict[str, Any]) -> "APIStatusError":
        """Create an error of the class for a status."""
        known = {cls.status: cls for cls in _all_below(APIStatusError)}
        fallback = InternalServerError if status_code >= 500 else BadRequestError
        cls = known.get(status_code, fallback)
        detail = problem.get("detail") or problem.get("title") or f"HTTP status {status_code}"
        return cls(str(detail), status_code=status_code, problem=problem)


def _all_below(cls: type[APIStatusError]) -> Generator[type[APIStatusError]]:
    for below in cls.__subclasses__():
        yield below
        yield from _all_below(below)


class BadRequestError(APIStatusError):
    """400: the request could not be read."""

    status = 400


class MethodNotAllowedError(BadRequestError):
    """405: this path does not support this method."""

    status = 405


class NotAcceptableError(BadRequestError):
    """406: the requested response format is not supported."""

    status = 406


class RequestTimeoutError(BadRequestError):
    """408: the request was not received completely in time."""

    status = 408


class MisdirectedRequestError(BadRequestError):
    """421: the service does not serve the host in the address."""

    status = 421


class HeadersTooLargeError(BadRequestError):
    """431: the request headers are larger than the limit."""

    status = 431


class AuthenticationError(APIStatusError):
    """401: the API key is missing or invalid."""

    status = 401


class PermissionDeniedError(APIStatusError):
    """403: the API key does not have the required scope."""

    status = 403


class NotFoundError(APIStatusError):
    """404: the resource does not exist, or belongs to another owner."""

    status = 404


class ConflictError(APIStatusError):
    """409: the state of the resource does not allow this."""

    status = 409


class PreconditionFailedError(APIStatusError):
    """412: the resource has changed in the meantime."""

    status = 412


class PayloadTooLargeError(APIStatusError):
    """413: the body is larger than the limit."""

    status = 413


class UnsupportedMediaError(APIStatusError):
    """415: the body has the wrong media type."""

    status = 415


class UnprocessableEntityError(APIStatusError):
    """422: the request is well-formed but invalid."""

    status = 422


class RateLimitError(APIStatusError):
    """429: too many requests."""

    status = 429


class InternalServerError(APIStatusError):
    """500: an unexpected error in the service."""

    status = 500


class BadGatewayError(InternalServerError):
    """502: a proxy received no valid response from the service."""

    status = 502


class GatewayTimeoutError(InternalServerError):
    """504: a proxy received no response from the service in time."""

    status = 504


class ServiceUnavailableError(APIStatusError):
    """503: the service is temporarily unavailable."""

    status = 503


class CannotTrace(GlasshouseError):
    """A module does something that cannot be expressed as a graph of layers."""

    def __init__(
        self,
        reason: str,
        /,
        *,
        file: str | None = None,
        line: int | None = None,
        source: str | None = None,
    ) -> None:
        where = "" if file is None else f"{file}:{line}: "
        shown = "" if source is None else f"\n    {source}"
        super().__init__(f"{where}{reason}{shown}")
        self.reason = reason
        self.file = file
        """The file of the user's code that cannot be traced; None if it is not known."""
        self.line = line
        """The line in that file."""
        self.source = source
        """The text of the line."""


_WITHOUT_LOG = ("data", "nonfinite")
"""Categories of failures whose message is complete, so that the log is not shown."""


class JobFailed(GlasshouseError):
    """The job failed."""

    def __init__(self, job_id: str, error: dict[str, Any]) -> None:
        where = ", ".join(
            f"{key} {error[key]}" for key in ("rank", "layer", "step") if error.get(key) is not None
        )
        lines = [f"{job_id} failed: {error.get('message', '')}" + (f" ({where})" if where else "")]
        if error.get("hint"):
            lines.append(f"hint: {error['hint']}")
        if error.get("log_tail") and error.get("category") not in _WITHOUT_LOG:
            lines.append(f"last lines of the log:\n{error['log_tail']}")
        super().__init__("\n".join(lines))
        self.job_id = job_id
        self.error = error
        """The ``error`` of the job, as in ``GET /jobs/{id}``."""


class JobCancelled(GlasshouseError):
    """The job was canceled."""


class WaitTimeout(GlasshouseError):
    """The wait timed out. The job is not canceled."""
