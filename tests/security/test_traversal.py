"""X5: two hundred ways to ask for a file that is nobody's business, wherever a name may stand."""

import itertools
import json
from collections.abc import Generator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.running import small_job
from tests.security.populated_api import PopulatedApi, Route, all_routes, body_of
from tests.security.raw import Raw

SECRET = b"the canary's secret song"
CANARY = "canary.txt"


def encodings(path: str) -> list[str]:
    """One path, as proxies, servers and frameworks have failed to see it."""
    once = quote(path, safe="")
    dots = path.replace(".", "%2e")
    return [
        path,
        once,
        quote(once, safe=""),
        quote(quote(once, safe=""), safe=""),
        dots,
        dots.replace("/", "%2f"),
        dots.replace("/", "%252f"),
        path.replace("/", "%5c"),
        path.replace("/", "\\"),
        path.replace("../", "..;/"),
        path.replace("../", "....//"),
        path.replace("../", "..%00/"),
        path.replace("../", "..%0d%0a/"),
        path.replace("/", "%c0%af"),
        path.replace("/", "%ef%bc%8f"),
        path.replace(".", "%c0%ae"),
        path.replace(".", "%u002e"),
        path + "%00.npz",
        path + "%23",
        path + "%3f",
    ]


def targets(home: Path) -> list[str]:
    return [
        f"../{CANARY}",
        f"../../../../../../../../../..{home}/{CANARY}",
        f"{home}/{CANARY}",
        f"file://{home}/{CANARY}",
        f"//localhost{home}/{CANARY}",
        "../../../../../../etc/passwd",
        "/etc/passwd",
        "/proc/self/environ",
        "..",
        "~/.ssh/id_rsa",
        "C:/Windows/win.ini",
        f"./x/../../{CANARY}",
        "../glasshouse.db",
        "../runtime.json",
        "link",
    ]


def payloads(home: Path) -> list[str]:
    found = dict.fromkeys(itertools.chain.from_iterable(map(encodings, targets(home))))
    return [payload for payload in found if payload]


NUM_SHARES = 8


def share(home: Path, number: int) -> list[str]:
    """What ``make test`` tries at one place: each target as it is and quoted, and some of the rest.

    One piece of code decodes the paths of all routes, so the other encodings are divided: any
    ``NUM_SHARES`` places in a row try all of them.
    """
    usual = dict.fromkeys(itertools.chain.from_iterable(encodings(t)[:2] for t in targets(home)))
    others = [payload for payload in payloads(home) if payload not in usual]
    return [*usual, *others[number % NUM_SHARES :: NUM_SHARES]]


def test_as_many_places_as_there_are_shares_try_everything():
    home = Path("/tmp/gh")  # noqa: S108 - nothing is opened
    tried = [share(home, number) for number in range(NUM_SHARES)]
    assert set(itertools.chain.from_iterable(tried)) == set(payloads(home))
    assert sum(len(route.places) for route in all_routes()) > 4 * NUM_SHARES


@pytest.fixture(scope="module")
def canary(populated: PopulatedApi) -> Path:
    """A file outside the store, and links to it inside."""
    home = populated.api.home
    path = home / CANARY
    path.write_bytes(SECRET)
    for folder in ("uploads", f"jobs/{populated.ids['jobs']}/1/artifacts", "datasets"):
        inside = home / "artifacts" / folder
        inside.mkdir(parents=True, exist_ok=True)
        (inside / "link").symlink_to(path)
    return path


@pytest.fixture(scope="module")
def admin(populated: PopulatedApi) -> Generator[Raw]:
    with Raw(populated.api.url, populated.api.admin) as opened:
        yield opened


@pytest.fixture(scope="module")
def raw(populated: PopulatedApi) -> Generator[Raw]:
    with Raw(populated.api.url, populated.ada) as opened:
        yield opened


def stored(home: Path) -> set[str]:
    """Every file of the service but those that come and go, as uploads of earlier tests do."""
    found = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}
    passing = ("glasshouse.db", "artifacts/uploads/", "work/")
    return {n for n in found if not n.endswith(".log") and not any(part in n for part in passing)}


def check(status: int, body: bytes, where: str) -> None:
    assert 400 <= status < 500, f"{where} → {status}"
    assert SECRET not in body, where
    assert b"root:x:0" not in body, where
    assert b"GLASSHOUSE_HOME" not in body, where


@pytest.mark.parametrize("how", ["shares", pytest.param("all", marks=pytest.mark.slow)])
def test_no_path_parameter_allows_traversal(
    route: Route, populated: PopulatedApi, canary: Path, admin: Raw, how: str
):
    home = populated.api.home
    assert len(payloads(home)) >= 200
    before_it = itertools.takewhile(lambda other: other != route, all_routes())
    first = sum(len(other.places) for other in before_it)
    options = body_of(route, populated)
    content = options.get("content", b"")
    body = content if isinstance(content, bytes) else content.encode()
    before = stored(populated.api.home)
    for number, place in enumerate(route.places, first):
        known = {
            name: quote(value, safe="") for name, value in populated.places(route.path).items()
        }
        for payload in payloads(home) if how == "all" else share(home, number):
            if " " in payload:
                continue
            target = route.path.format(**(known | {place: payload}))
            answer = admin.ask(route.method, target, options.get("headers"), body)
            if answer.status in (200, 304):  # '?' and '#' cut a path short, and '..' is one
                assert SECRET not in answer.body
                continue
            check(answer.status, answer.body, f"{route.method} {target}")
    assert stored(populated.api.home) >= before
    assert canary.read_bytes() == SECRET


HEADERS = (
    "Last-Event-ID",
    "If-Match",
    "If-None-Match",
    "If-Range",
    "Idempotency-Key",
    "X-Request-Id",
    "Range",
    "Prefer",
    "Accept",
    "Content-Type",
    "Content-Disposition",
    "Content-Location",
    "X-Original-URL",
    "X-Rewrite-URL",
    "X-Forwarded-Prefix",
    "X-Sendfile",
    "Referer",
    "Cookie",
)


@pytest.mark.parametrize("header", HEADERS)
def test_no_header_allows_traversal(populated: PopulatedApi, canary: Path, raw: Raw, header: str):
    job = populated.ids["jobs"]
    before = stored(populated.api.home)
    targets = itertools.cycle(
        (
            ("GET", f"/api/v1/jobs/{job}/artifacts/outputs.npz", b""),
            ("GET", f"/api/v1/jobs/{job}/events", b""),
            ("POST", f"/api/v1/jobs/{job}/probes", b"{}"),
        )
    )
    for payload, (method, target, body) in zip(payloads(populated.api.home), targets, strict=False):
        answer = raw.ask(method, target, {header: payload}, body)
        assert answer.status < 500, (method, target, payload)
        assert SECRET not in answer.body
        assert all("canary" not in value for value in answer.headers.values())
    assert stored(populated.api.home) >= before
    assert canary.read_bytes() == SECRET


QUERIES = (
    "/api/v1/datasets?format={}",
    "/api/v1/jobs?parent={}",
    "/api/v1/jobs?q={}",
    "/api/v1/jobs?after={}",
    "/api/v1/jobs/{job}/tensors?name={}",
    "/api/v1/jobs/{job}/captures?layer={}",
    "/api/v1/jobs/{job}/stats?layer={}",
    "/api/v1/jobs/{job}/metrics/query?name={}",
    "/api/v1/jobs/{job}/plots/loss?layer={}",
    "/api/v1/jobs/{job}/stream?after={}",
    "/api/v1/stream?job={}",
    "/api/v1/datasets/{dataset}/rows?split={}",
    "/open?ticket={}",
)


@pytest.mark.parametrize("template", QUERIES)
def test_no_query_allows_traversal(populated: PopulatedApi, canary: Path, raw: Raw, template: str):
    known = template.replace("{job}", populated.ids["jobs"]).replace(
        "{dataset}", populated.ids["datasets"]
    )
    for payload in payloads(populated.api.home):
        target = known.replace("{}", quote(payload, safe="%"))
        method = "POST" if "format=" in target else "GET"
        answer = raw.ask(method, target, {}, b"1,2\n" if method == "POST" else b"")
        assert answer.status < 500, target
        assert SECRET not in answer.body
    assert canary.read_bytes() == SECRET


def test_no_field_of_a_body_allows_traversal(populated: PopulatedApi, canary: Path, raw: Raw):
    before = stored(populated.api.home)
    for payload in payloads(populated.api.home)[::3]:
        spec = small_job(payload)
        infer = {"kind": "infer", "checkpoint": payload, "inputs": {"image": [[1]]}}
        split = small_job(populated.ids["datasets"])
        split["data"]["train"]["split"] = payload
        layer = small_job(populated.ids["datasets"])
        layer["network"]["layers"][0]["name"] = payload
        kind = small_job(populated.ids["datasets"])
        kind["network"]["layers"][0]["type"] = payload
        for body in (spec, infer, split, layer, kind, small_job(payload, name=payload)):
            answer = raw.ask(
                "POST",
                "/api/v1/plan",
                {"Content-Type": "application/json"},
                json.dumps(body).encode(),
            )
            assert answer.status in (400, 404, 409, 422), (body, answer.status, answer.body)
            assert SECRET not in answer.body
    assert stored(populated.api.home) >= before
    assert canary.read_bytes() == SECRET
