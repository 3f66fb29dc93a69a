"""Requests while the database is unavailable."""

import time

import pytest

from glasshouse.client import Client
from tests.integration.serving.conftest import running_service
from tests.running import Postgres
from tests.waiting import until

OUTAGE_S = 12.0
"""Longer than a lease, and than the API knows a key."""


@pytest.mark.slow
def test_requests_are_answered_while_the_database_is_unavailable(own_postgres: Postgres):
    with running_service(own_postgres.url) as service:
        service.publish("m", service.checkpoint())
        job = service.serve("m", request_log={"max_requests": 10})
        assert service.predict("m").version == 1
        own_postgres.kill()
        began = time.monotonic()
        while time.monotonic() < began + OUTAGE_S:
            assert service.predict("m").version == 1
            time.sleep(0.2)
        assert service.predict("unknown").status == 503
        own_postgres.start()
        until(lambda: service.predict("unknown").status == 404)
        assert service.predict("m", 7).version == 1
        assert service.harness.job(job).attempt == 1
        with Client(service.api.url, api_key=service.key) as client:
            log = client.jobs.get(job).requests
            until(lambda: [one.data["num_rows"] for one in log()] == [7] + [1] * 9)
        assert "never retrieved" not in service.api.log
        service.end(job)
