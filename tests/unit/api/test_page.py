"""The page: what of its files is served, to whom, and how it is kept by browsers."""

import asyncio
import gzip
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from api.app import create_app
from api.http.dashboard import PATHS, POLICY, DashboardBuild, is_public
from models.settings import Settings

INDEX = "<!doctype html><title>Glasshouse</title>"
SCRIPT = "console.log('a script that becomes smaller');\n" * 40
Ask = Callable[..., httpx2.Response]


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """A build, and beside it what is nobody's business."""
    place = tmp_path / "dist"
    (place / "assets" / "inner").mkdir(parents=True)
    (place / "index.html").write_text(INDEX)
    (place / "assets" / "main-ABC.js").write_text(SCRIPT)
    (place / "assets" / "main-ABC.css").write_text("a{}")
    (place / "assets" / "inner" / "deep.js").write_text("secret")
    (place / "notes.txt").write_text("secret")
    (tmp_path / "secret.js").write_text("secret")
    (place / "assets" / "link.js").symlink_to(tmp_path / "secret.js")
    return place


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Generator[FastAPI]:
    """The app of a service that nobody starts."""
    made = create_app(Settings(home=tmp_path_factory.mktemp("home")))
    yield made
    made.state.resources.database.close()


@pytest.fixture
def serve(app: FastAPI) -> Callable[[Path], Ask]:
    """Serve a build; gives what asks for a path, without a key."""
    transport = httpx2.ASGITransport(app)

    async def send(method: str, path: str, headers: dict[str, str]) -> httpx2.Response:
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, headers=headers)

    def ask(path: str, method: str = "GET", **headers: str) -> httpx2.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return asyncio.run(send(method, path, named))

    def serve(place: Path) -> Ask:
        app.state.page = DashboardBuild(place)
        app.state.page.index()
        return ask

    return serve


@pytest.fixture
def ask(serve: Callable[[Path], Ask], dist: Path) -> Ask:
    return serve(dist)


@pytest.mark.parametrize("path", [path.format(id="x", tab="t", layer="a.w") for path in PATHS])
def test_every_view_is_the_same_page_and_wants_no_key(ask: Ask, path: str):
    answer = ask(path)
    assert (answer.status_code, answer.text) == (200, INDEX)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [("main-ABC.js", "text/javascript", SCRIPT), ("main-ABC.css", "text/css", "a{}")],
)
def test_its_files_have_their_types_and_are_kept_forever(ask: Ask, name: str, kind: str, text):
    answer = ask(f"/assets/{name}", Accept_Encoding="identity")
    assert (answer.status_code, answer.text) == (200, text)
    assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
    assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert "content-encoding" not in answer.headers


def test_what_becomes_smaller_is_sent_zipped_to_who_takes_it(ask: Ask):
    plain = ask("/assets/main-ABC.js", Accept_Encoding="br, gzip;q=0")
    zipped = ask("/assets/main-ABC.js", Accept_Encoding="br;q=1, gzip ;q=0.5")
    assert zipped.headers["content-encoding"] == "gzip"
    assert int(zipped.headers["content-length"]) == len(gzip.compress(SCRIPT.encode(), 9))
    assert zipped.text == plain.text == SCRIPT
    assert zipped.headers["etag"] != plain.headers["etag"]
    assert zipped.headers["vary"] == plain.headers["vary"] == "Accept-Encoding"
    small = ask("/assets/main-ABC.css", Accept_Encoding="gzip")
    assert "content-encoding" not in small.headers


@pytest.mark.parametrize("path", ["/jobs", "/assets/main-ABC.js"])
def test_what_a_browser_has_is_not_sent_again(ask: Ask, path: str):
    first = ask(path)
    again = ask(path, If_None_Match=first.headers["etag"])
    assert (again.status_code, again.content) == (304, b"")
    for name in ("etag", "cache-control", "vary"):
        assert again.headers[name] == first.headers[name]
    assert ask(path, If_None_Match='"another"').status_code == 200


@pytest.mark.parametrize("path", ["/jobs/x", "/assets/main-ABC.js"])
def test_head_has_the_headers_of_get(ask: Ask, path: str):
    get, head = ask(path), ask(path, "HEAD")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == get.headers["content-length"]
    assert ask(path, "POST").status_code == 405


@pytest.mark.parametrize(
    "name",
    [
        "nothing.js",
        "link.js",
        "inner",
        "inner/deep.js",
        "inner%2fdeep.js",
        "..%2findex.html",
        "..%2fnotes.txt",
        "..%2f..%2fsecret.js",
        "%2e%2e%2fnotes.txt",
        "..%5cnotes.txt",
        "%252e%252e%252fnotes.txt",
        "....//notes.txt",
        "main-ABC.js/",
        "main-ABC.js%00.css",
        "main-abc.js",
        "%20main-ABC.js",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        ".",
        "",
    ],
)
def test_no_other_file_can_be_asked_for(ask: Ask, name: str):
    answer = ask(f"/assets/{name}")
    assert answer.status_code in (401, 404)  # 401: none of the page's paths
    assert answer.headers["content-type"] == "application/problem+json"
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    "path",
    [
        "/jobs/",
        "/jobs/x/",
        "/jobs/x/layers/fc/y",
        "/jobs//x",
        "/Jobs",
        "/nothing",
        "/compare/x",
        "/index.html",
        "/assets",
        "/assets/inner/deep.js",
        "/api/v1/jobs",
        "/docs",
    ],
)
def test_a_path_that_is_not_the_pages_stays_closed(ask: Ask, path: str):
    assert not is_public(path)
    answer = ask(path)
    assert (answer.status_code, answer.json()["code"]) == (401, "key_missing")


def test_a_new_build_is_noticed_and_its_old_files_go(ask: Ask, dist: Path):
    (dist / "assets" / "main-ABC.js").unlink()
    (dist / "assets" / "main-DEF.js").write_text("new")
    (dist / "index.html").write_text("the next page")
    assert ask("/jobs").text == "the next page"
    assert ask("/assets/main-DEF.js").text == "new"
    assert ask("/assets/main-ABC.js").status_code == 404


def test_while_a_build_is_made_the_last_one_is_served(ask: Ask, dist: Path):
    (dist / "index.html").unlink()
    (dist / "assets" / "main-ABC.js").unlink()
    assert ask("/jobs").text == INDEX
    assert ask("/assets/main-ABC.js").text == SCRIPT


def test_without_a_build_the_page_says_how_to_get_one(serve: Callable[[Path], Ask], tmp_path: Path):
    ask = serve(tmp_path / "nothing")
    answer: Any = ask("/jobs")
    assert answer.status_code == 200
    assert "make page" in answer.text
    assert "/docs" in answer.text
    assert answer.headers["content-security-policy"] == POLICY
    assert ask("/assets/main-ABC.js").status_code == 404
