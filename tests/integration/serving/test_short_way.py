"""Usual requests take a short way through the API, unusual ones the long way; the answers agree."""

import gzip
import json
import re
from typing import Any

import httpx2

from tests.integration.serving.service import ROW, Service

GOOD = {"inputs": {"x": [ROW, ROW]}}
CASES: list[tuple[int, str, Any, dict[str, str], dict[str, str]]] = [
    (200, "ways", GOOD, {}, {}),
    (200, "ways:1", GOOD, {}, {"timeout_s": "5", "priority": "3"}),
    (200, "ways", GOOD, {"accept": "application/vnd.safetensors"}, {}),
    (200, "ways@latest", GOOD, {}, {}),
    (415, "ways", GOOD, {"content-encoding": "br"}, {}),
    (422, "ways", {"inputs": {"x": [[1.0]]}}, {}, {}),
    (422, "ways", {"inputs": {"y": [ROW]}}, {}, {}),
    (415, "ways", GOOD, {"content-type": "text/csv"}, {}),
    (422, "ways", GOOD, {}, {"priority": "urgent"}),
    (422, "ways", GOOD, {}, {"timeout_s": "0"}),
    (422, "ways", GOOD, {}, {"prioriti": "1"}),
    (404, "absent", GOOD, {}, {}),
    (404, "ways@absent", GOOD, {}, {}),
]
"""The status, the model, the body, headers and query."""
VARYING = ("x-request-id", "server-timing", "date", "content-length")


def test_both_ways_answer_alike(service: Service):
    service.publish("ways", service.checkpoint())
    service.serve("ways")
    with httpx2.Client(base_url=service.api.url, timeout=60) as client:
        for status, name, body, headers, query in CASES:
            own = {"authorization": f"Bearer {service.key}", "content-type": "application/json"}

            def ask(**more: str) -> httpx2.Response:
                return client.post(
                    f"/api/v1/models/{name}/predict",  # noqa: B023 (called in this turn)
                    content=json.dumps(body).encode(),  # noqa: B023
                    headers=own | headers | more,  # noqa: B023
                    params=query,  # noqa: B023
                )

            ask()  # the key is known for the next two seconds
            short, long = ask(), ask(**{"X-Request-Id": "given"})
            assert long.headers["x-request-id"] == "given"
            assert re.fullmatch(r"req_[0-9a-f]{24}", short.headers["x-request-id"])
            assert short.status_code == long.status_code == status, (name, body, short.text)
            assert _content(short) == _content(long)
            assert _headers(short) == _headers(long)


def test_a_body_may_be_compressed(service: Service):
    service.publish("packed", service.checkpoint())
    service.serve("packed@latest")
    own = {"authorization": f"Bearer {service.key}", "content-type": "application/json"}
    where, plain = f"{service.api.url}/api/v1/models/packed/predict", json.dumps(GOOD).encode()
    expected = httpx2.post(where, content=plain, headers=own).json()
    coded = own | {"content-encoding": "gzip"}
    found = httpx2.post(where, content=gzip.compress(plain), headers=coded)
    assert (found.status_code, found.json()) == (200, expected)
    assert httpx2.post(where, content=b"no gzip", headers=coded).status_code == 400


def _content(response: httpx2.Response) -> Any:
    if not response.headers["content-type"].endswith("json"):
        return response.content
    return {key: value for key, value in response.json().items() if key != "request_id"}


def _headers(response: httpx2.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name not in VARYING}
