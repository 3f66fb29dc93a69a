"""What waiting is for the client that blocks. Its twin is `glasshouse.client.aio.running`."""

import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar, cast

import httpx2

from glasshouse.client.address import Address
from glasshouse.client.card import Card
from glasshouse.errors import APIError

Result = TypeVar("Result")


def sleep(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)


def in_thread(work: Callable[[], Result]) -> Result:
    """Do heavy work: here and now, for there is nobody else to be kept waiting."""
    return work()


def in_background(work: Callable[[], None]) -> None:
    """Do something beside whatever is done next; it ends with the program at the latest."""
    threading.Thread(target=work, daemon=True).start()


def chunks(content: Iterable[bytes]) -> Iterable[bytes]:
    """A body as the HTTP client takes it."""
    return content


def settled(value: object) -> object:
    """What a callback returned.

    Raises:
        TypeError: a coroutine, which nobody here can wait for.
    """
    if isinstance(value, Coroutine):
        cast("Coroutine[Any, Any, Any]", value).close()
        raise TypeError("a callback is a coroutine: that needs gh.AsyncClient")
    return value


def show_at_once(read: Callable[[], Card], known: Card) -> str:
    """The HTML of a card that is read now; where that is not possible, of what is known."""
    try:
        return read()._repr_html_()  # pyright: ignore[reportPrivateUsage] (Jupyter's name)
    except APIError:
        return known._repr_html_()  # pyright: ignore[reportPrivateUsage]


def in_process() -> tuple[Address, httpx2.Client]:
    """A service of this process, and what sends requests to it.

    Raises:
        APIConnectionError: what it needs is not installed, or something else has its name.
    """
    from glasshouse.client.inproc import InProcess  # noqa: PLC0415 (imports the whole service)

    made = InProcess()
    return made.address, made
