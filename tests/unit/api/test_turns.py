import asyncio

import pytest

from api.planning.fair_queue import FairQueue


@pytest.mark.parametrize("at_once", [1, 3])
def test_one_of_few_does_not_wait_behind_one_of_many(at_once: int):
    async def run() -> list[str]:
        turns, queue = FairQueue(at_once), asyncio.Lock()
        done: list[str] = []

        async def work(owner: str) -> None:
            async with turns.of(owner), queue:
                await asyncio.sleep(0)
                done.append(owner)

        many = [asyncio.create_task(work("ada")) for _ in range(50)]
        await asyncio.sleep(0)
        few = asyncio.create_task(work("bob"))
        await asyncio.gather(*many, few)
        return done

    assert asyncio.run(run()).index("bob") <= at_once + 1


def test_an_owner_who_is_gone_is_forgotten():
    async def run() -> None:
        turns = FairQueue()
        async with turns.of("ada"):
            assert len(turns._of) == 1
        assert len(turns._of) == 0

    asyncio.run(run())
