"""Waiting and background work of the blocking client; see `glasshouse.client.aio.running`."""

import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar, cast

import httpx2

from glasshouse.client.connection.address import Address
from glasshouse.client.monitoring.job_card import Card
from glasshouse.errors import APIError

Result = TypeVar("Result")


def sleep(seconds: float) -> None:
    """Sleep."""
    time.sleep(seconds)


def in_thread(work: Callable[[], Result]) -> Result:
    """Run blocking work in the calling thread."""
    return work()


def in_background(work: Callable[[], None]) -> None:
    """Run a function in a daemon thread."""
    threading.Thread(target=work, daemon=True).start()


def chunks(content: Iterable[bytes]) -> Iterable[bytes]:
    """Return the chunks of a request body."""
    return content


def resolved(value: object) -> object:
    """Return the value of a callback.

    Raises:
        TypeError: the value is a coroutine, which the blocking client cannot await.
    """
    if isinstance(value, Coroutine):
        cast("Coroutine[Any, Any, Any]", value).close()
        raise TypeError("a callback is a coroutine: use gh.AsyncClient")
    return value


def card_html(read: Callable[[], Card], known: Card) -> str:
    """Return the HTML of a fresh card, or of the last known one if the service fails."""
    try:
        return read()._repr_html_()  # pyright: ignore[reportPrivateUsage] (Jupyter's name)
    except APIError:
        return known._repr_html_()  # pyright: ignore[reportPrivateUsage]


def in_process() -> tuple[Address, httpx2.Client]:
    """Start a service in this process; return its address and HTTP client.

    Raises:
        APIConnectionError: a required package is not installed or is shadowed by another module.
    """
    from glasshouse.client.connection.in_process import InProcess  # noqa: PLC0415 (imports the whole service)

    client = InProcess()
    return client.address, client
