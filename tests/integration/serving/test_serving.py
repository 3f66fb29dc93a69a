"""Requests to replicas that are killed, stand still, are full or close."""

import asyncio

from tests.integration.serving.service import Service, statuses


def test_a_request_is_answered_by_the_version_that_is_served(service: Service):
    service.publish("m1", service.checkpoint())
    service.serve("m1")
    answer = service.predict("m1", 3)
    assert answer.version == 1
    assert len(answer.document["outputs"]["fc2/value"]) == 3


def test_many_clients(service: Service):
    service.publish("m2", service.checkpoint())
    service.serve("m2")

    async def act():
        return await asyncio.gather(*(service.ask("m2") for _ in range(20)))

    assert statuses(asyncio.run(act())) == {200: 20}
