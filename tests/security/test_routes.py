"""X1, X3, X4: every operation of the app, asked by those who may not."""

import httpx2
import pytest

from tests.running import NO_TLS
from tests.security.populated_api import (
    METHODS,
    OPEN,
    READING_POSTS,
    SHARED,
    UNSAFE,
    PopulatedApi,
    Route,
    body_of,
    url_of,
)


def code_of(answer: httpx2.Response) -> tuple[int, str | None]:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return answer.status_code, answer.json()["code"]


def test_every_route_asks_for_one_scope_unless_it_is_open(route: Route):
    assert (route.scope is None) == (route.path in OPEN)
    if route.method in UNSAFE and route.path not in READING_POSTS:
        assert route.scope in ("submit", "admin"), "it changes something, and any reader may ask it"


def test_without_a_key_nothing_answers(
    route: Route, populated: PopulatedApi, nobody: httpx2.Client
):
    for method in METHODS:
        answer = nobody.request(method, url_of(route, populated))
        if route.path in OPEN:
            assert answer.status_code not in (401, 403)
            continue
        assert answer.status_code == 401, method
        assert answer.headers["www-authenticate"] == "Bearer"
        assert method == "HEAD" or code_of(answer) == (401, "key_missing")


def test_a_key_with_too_small_a_scope_is_refused(
    route: Route, populated: PopulatedApi, reader: httpx2.Client, ada: httpx2.Client
):
    asked = {"submit": [reader], "admin": [reader, ada]}.get(route.scope or "", [])
    for client in asked:
        answer = client.request(route.method, url_of(route, populated), **body_of(route, populated))
        assert code_of(answer) == (403, "scope_too_small")


def test_another_owners_resources_are_not_found(
    route: Route, populated: PopulatedApi, ada: httpx2.Client, bob: httpx2.Client
):
    if route.path in OPEN | SHARED or not (route.places or "job=" in url_of(route, populated)):
        return
    url, options = url_of(route, populated), body_of(route, populated)
    answer = bob.request(route.method, url, **options)
    assert answer.status_code == 404, f"{answer.status_code}: {answer.text[:500]}"
    owned = next(name for name in populated.ids.values() if name in url)
    nothing = url.replace(owned, f"{owned[:-6]}zzzzzz")
    if "stream?" not in url:
        unknown = bob.request(route.method, nothing, **options)
        assert code_of(unknown) == code_of(answer), "one can tell that it exists"
    if route.method == "GET":
        with ada.stream("GET", url) as own:
            assert own.status_code in (200, 404, 406), own.status_code
            if own.status_code == 404:  # of a thing of the job's own, which this job lacks
                own.read()
                assert own.json()["code"] != answer.json()["code"]


def test_what_another_did_has_changed_nothing(populated: PopulatedApi, ada: httpx2.Client):
    ids = populated.ids
    for path in (
        f"/api/v1/jobs/{ids['jobs']}/probes/{ids['probes']}",
        f"/api/v1/datasets/{ids['datasets']}",
        f"/api/v1/checkpoints/{ids['checkpoints']}",
        f"/api/v1/checkpoints/{ids['checkpoints']}/weights",
        f"/api/v1/jobs/{ids['jobs']}/artifacts/outputs.npz",
    ):
        assert ada.get(path).status_code == 200, path
    job = ada.get(f"/api/v1/jobs/{ids['jobs']}").json()
    assert job["name"] == "watched"


def test_another_hosts_name_is_refused_with_a_good_key_too(route: Route, populated: PopulatedApi):
    url, options = url_of(route, populated), body_of(route, populated)
    headers = options.pop("headers", {})
    with populated.api.client() as client:
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil", "[::2]"):
            answer = client.request(route.method, url, headers=headers | {"Host": host}, **options)
            assert code_of(answer) == (421, "host_not_allowed"), host


def test_a_page_of_another_origin_is_refused(route: Route, populated: PopulatedApi, session: str):
    headers = {"Cookie": f"glasshouse_session={session}"}
    url, options = url_of(route, populated), body_of(route, populated)
    headers |= options.pop("headers", {})
    with httpx2.Client(base_url=populated.api.url, timeout=120, verify=NO_TLS) as browser:
        for origin in ("https://evil.example", "null", populated.api.url.replace("http", "ftp")):
            crossing = headers | {"Origin": origin}
            for method in {route.method, "POST", "DELETE"}:
                answer = browser.request(method, url, headers=crossing, **options)
                assert code_of(answer) == (403, "origin_not_allowed")
        if route.method in UNSAFE:
            without = browser.request(route.method, url, headers=headers, **options)
            assert code_of(without) == (403, "origin_not_allowed"), "no Origin, and a cookie"


@pytest.fixture(scope="module")
def session(populated: PopulatedApi) -> str:
    """The cookie of a browser session of Bob's."""
    with populated.api.client(populated.bob) as client:
        ticket = client.post("/api/v1/tickets").json()["url"]
    with httpx2.Client() as browser:
        return browser.get(ticket).cookies["glasshouse_session"]


OF_ANY_TYPE = (
    "POST /api/v1/datasets",
    "POST /api/v1/checkpoints",
    "POST /api/v1/models/{name}/predict",
    "POST /api/v1/jobs/{id}/predict",
    "POST /v2/models/{name}/infer",
    "POST /v2/models/{name}/versions/{version}/infer",
)
"""Their bodies are files, of which no type is asked, or a replica looks at the type."""


def test_a_body_must_say_that_it_is_json(route: Route, populated: PopulatedApi):
    options = body_of(route, populated)
    if not options or str(route) in OF_ANY_TYPE:
        return
    with populated.api.client() as admin:
        for media in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            answer = admin.request(
                route.method,
                url_of(route, populated),
                content=options["content"],
                headers={"Content-Type": media},
            )
            assert code_of(answer) == (415, "unsupported_media"), media


def test_every_route_that_reads_a_body_has_one_here(route: Route, populated: PopulatedApi):
    """So that the tests above reach its inside and not only its door."""
    with populated.api.client() as admin:
        document = admin.get("/openapi.json").json()
    operation = document["paths"].get(route.path, {}).get(route.method.lower(), {})
    assert ("requestBody" in operation) == bool(body_of(route, populated)), (
        f"add a body of {route} to body_of in tests/security/populated_api.py"
    )


def test_no_other_origin_is_ever_allowed(route: Route, populated: PopulatedApi):
    headers = {"Origin": populated.api.url, "Access-Control-Request-Method": "POST"}
    with populated.api.client(headers=headers) as client:
        answer = client.options(url_of(route, populated))
    assert not [name for name in answer.headers if name.startswith("access-control")]
