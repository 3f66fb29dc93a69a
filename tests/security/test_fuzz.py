"""X18: the whole OpenAPI document against a running API, with good values, bad ones and sequences.

Schemathesis' phase ``coverage`` goes through the bounds of every field, 10,000 cases and more: it
is of ``make test-slow``. In ``make test`` every operation has invented bodies, good and bad, and
chains of operations. ``make fuzz`` tries all of it, with many more values.
"""

import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.running import running_api
from tests.security.figures import FUZZED
from tests.security.populated_api import PopulatedApi

EXAMPLES = os.environ.get("FUZZ_EXAMPLES", "5")
CHECKS = (
    "not_a_server_error",
    "ignored_auth",
    "use_after_free",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
)


@pytest.fixture(scope="module")
def own_populated() -> Generator[PopulatedApi]:
    """An API of its own: what is tried here may well delete things."""
    with running_api(
        max_json_bytes="200000",
        max_upload_bytes="1000000",
        planner_timeout_s="60",
        quota_queued_jobs="5000",
        quota_requests_per_s="100000",
    ) as api:
        made = PopulatedApi(api)
        made.fill()
        yield made


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "phases",
    [
        pytest.param("examples,fuzzing,stateful", id="invented"),
        pytest.param("coverage", id="every-bound", marks=pytest.mark.slow),
    ],
)
def test_no_request_of_the_openapi_document_breaks_the_service(
    phases: str, own_populated: PopulatedApi, tmp_path: Path, request: pytest.FixtureRequest
):
    api = own_populated.api
    with api.client() as client:  # created once; its users below wait ten seconds only
        assert client.get("/openapi.json").status_code == 200
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{api.url}/openapi.json"]
    command += ["--header", f"Authorization:Bearer {api.key('eve', 'submit')}"]
    command += ["--checks", ",".join(CHECKS), "--max-examples", EXAMPLES, "--mode", "all"]
    command += ["--phases", phases, "--seed", "1"]
    # streams have no end, and /readyz is 503 where no worker is: both have tests of their own
    command += ["--exclude-path-regex", "stream$|^/readyz$", "--request-timeout", "90"]
    command += ["--suppress-health-check", "all", "--warnings", "off", "--no-color"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=3500
    )
    assert done.returncode == 0, done.stdout[-15_000:] + done.stderr[-3000:]
    request.node.user_properties += [(FUZZED, line) for line in summary(done.stdout)]
    with api.client(own_populated.ada) as ada:
        for path in (
            f"/api/v1/jobs/{own_populated.ids['jobs']}",
            f"/api/v1/datasets/{own_populated.ids['datasets']}",
            f"/api/v1/checkpoints/{own_populated.ids['checkpoints']}/weights",
        ):
            assert ada.get(path).status_code == 200, "another tenant's request reached it"
    assert "request_failed" not in api.log
    assert "Traceback" not in api.log


def summary(printed: str) -> list[str]:
    """The lines of its summary that have a number: operations, cases, seconds."""
    _, _, end = printed.partition(" SUMMARY ")
    return [line.strip() for line in end.splitlines()[1:] if any(map(str.isdigit, line))]
