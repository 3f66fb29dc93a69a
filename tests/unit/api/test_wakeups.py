"""Waiting for news."""

import asyncio
import contextlib
import time

from api.streaming.wakeups import Subscription


def test_a_change_between_two_waits_is_reported_exactly_once():
    async def scene() -> list[bool]:
        watch = Subscription(poll_s=0.25)
        watch.notify()
        watch.notify()
        times: list[bool] = []
        for _ in range(2):
            began = time.monotonic()
            await watch.wait()
            times.append(time.monotonic() - began >= 0.24)
        return times

    assert asyncio.run(scene()) == [False, True]


def test_a_ring_ends_the_wait_of_every_waiter():
    async def scene() -> None:
        watch = Subscription(poll_s=300)
        waiting = asyncio.create_task(watch.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        watch.notify()
        watch.notify()  # before the waiter has had its turn
        await waiting

    asyncio.run(scene())


def test_no_wait_is_longer_than_asked_or_than_the_poll():
    async def scene() -> None:
        await Subscription(poll_s=300).wait(0.01)
        await Subscription(poll_s=0.01).wait(300)
        await Subscription(poll_s=300).wait(-1)

    asyncio.run(scene())


def test_a_wait_that_is_given_up_leaves_the_news_to_the_next():
    async def scene() -> None:
        watch = Subscription(poll_s=300)
        waiting = asyncio.create_task(watch.wait())
        await asyncio.sleep(0)
        watch.notify()
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await watch.wait()

    asyncio.run(scene())
