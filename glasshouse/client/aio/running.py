"""What waiting is for the client that must never hold up its event loop.

The only module beside this client's `__init__` that is written twice, here and one folder up; all
others are made from those here by ``python .ci/twins.py``.
"""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from typing import TypeVar, cast

import httpx2

from glasshouse.client.address import Address
from glasshouse.client.card import Card
from glasshouse.errors import APIConnectionError

Result = TypeVar("Result")
_BESIDE: set[asyncio.Task[None]] = set()


async def sleep(seconds: float) -> None:
    """Wait, while the loop does other things."""
    await asyncio.sleep(seconds)


async def in_thread(work: Callable[[], Result]) -> Result:
    """Do heavy work (tracing, hashing, files) in a thread."""
    return await asyncio.to_thread(work)


def in_background(work: Callable[[], Coroutine[None, None, None]]) -> None:
    """Do something beside whatever is done next; it ends with the loop at the latest."""
    task = asyncio.get_running_loop().create_task(work())
    _BESIDE.add(task)  # the loop itself would forget it
    task.add_done_callback(_BESIDE.discard)


async def chunks(content: Iterable[bytes]) -> AsyncGenerator[bytes]:
    """A body as the HTTP client takes it, each piece read or made in a thread."""
    pieces = iter(content)
    while (piece := await in_thread(lambda: next(pieces, None))) is not None:
        yield piece


async def settled(value: object) -> object:
    """What a callback returned, waited for if it is a coroutine."""
    return await cast("Awaitable[object]", value) if inspect.isawaitable(value) else value


def show_at_once(read: Callable[[], Awaitable[Card]], known: Card) -> str:
    """The HTML of a card: of what is known, for who shows things cannot wait."""
    return known._repr_html_()  # pyright: ignore[reportPrivateUsage] (Jupyter's name)


def in_process() -> tuple[Address, httpx2.AsyncClient]:
    """There is none here: a job that runs in this process would hold up the loop.

    Raises:
        APIConnectionError: always.
    """
    raise APIConnectionError("inproc:// runs jobs in the calling thread: use gh.Client, not this")
