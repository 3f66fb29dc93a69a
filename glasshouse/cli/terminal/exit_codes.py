"""Exit codes of commands."""

from glasshouse.errors import (
    APIConnectionError,
    AuthenticationError,
    GatewayTimeoutError,
    GlasshouseError,
    JobCancelled,
    JobFailed,
    NotFoundError,
    PermissionDeniedError,
    WaitTimeout,
)

OK = 0
ERROR = 1
USAGE = 2
JOB_FAILED = 3
AUTH = 4
NOT_FOUND = 5
TIMEOUT = 6
CANCELLED = 7
UNREACHABLE = 8
DETACHED = 130
"""Ctrl-C while watching: the job continues."""

_CODES: tuple[tuple[type[Exception], int], ...] = (
    (JobFailed, JOB_FAILED),
    (AuthenticationError, AUTH),
    (PermissionDeniedError, AUTH),
    (NotFoundError, NOT_FOUND),
    (WaitTimeout, TIMEOUT),
    (GatewayTimeoutError, TIMEOUT),
    (JobCancelled, CANCELLED),
    (APIConnectionError, UNREACHABLE),
)


def code_of(error: GlasshouseError | OSError | ValueError) -> int:
    """The exit code for an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), ERROR)
