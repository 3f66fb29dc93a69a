"""What waiting is for the client that blocks. Its twin is `glasshouse.client.aio.running`."""

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

Result = TypeVar("Result")


def sleep(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)


def in_thread(work: Callable[[], Result]) -> Result:
    """Do heavy work: here and now, for there is nobody else to be kept waiting."""
    return work()


def chunks(content: Iterable[bytes]) -> Iterable[bytes]:
    """A body as the HTTP client takes it."""
    return content
