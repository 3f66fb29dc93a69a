"""X16: texts of users that would like to be something else: a header, a line of a log, a page."""

import json
from typing import Any
from urllib.parse import quote

import httpx2
import pytest

from models.jobs.shipments import Batch
from models.observations.events import NewEvent
from models.tables import now
from tests.integration.inspection.services import Writer
from tests.running import small_job
from tests.security.populated_api import PopulatedApi

NASTY = {
    "line feed": "a\nSet-Cookie: x=y",
    "carriage return": "a\r\n\r\n<html>",
    "ansi": "\x1b[2J\x1b[31mred",
    "bell": "a\x07b",
    "zero": "a\x00b",
    "bidi": "user\u202etxt.exe",
    "isolates": "\u2066\u2067x\u2069",
    "line separator": "a\u2028b\u2029c",
    "next line": "a\u0085b",
    "html": "<script>alert(1)</script>",
    "attribute": '"><img src=x onerror=alert(1)>',
    "template": "{{7*7}}${7*7}#{7*7}",
    "formula": "=cmd|' /C calc'!A0",
    "percent": "%0d%0aX: y",
    "format": "%s%n{0.__class__}",
    "sql": "'; DROP TABLE jobs; --",
    "surrogate": "\ud800",
    "long": "x" * 100_000,
}


def check(answer: httpx2.Response) -> None:
    assert answer.status_code < 500, answer.text
    assert "set-cookie" not in answer.headers
    assert answer.headers["x-content-type-options"] == "nosniff"
    kind = answer.headers.get("content-type", "")
    assert not kind.startswith(("text/html", "image/svg", "application/xhtml"))


@pytest.mark.parametrize("name", NASTY)
def test_a_hostile_text_is_refused_or_returned_as_data(
    populated: PopulatedApi, ada: httpx2.Client, name: str
):
    text = NASTY[name]
    spec = small_job(populated.ids["datasets"])
    bodies: list[dict[str, Any]] = [
        spec | {"name": text},
        spec | {"labels": {"team": text}},
        spec | {"labels": {text: "x"}},
        spec | {text: 1},
        spec | {"loss": {"type": text, "inputs": ["fc", "label"]}},
        spec | {"devices": {"type": "cpu", "worker": text}},
    ]
    for body in bodies:
        content = json.dumps(body)
        headers = {"Content-Type": "application/json"}
        answer = ada.post("/api/v1/jobs", content=content, headers=headers)
        check(answer)
        if answer.status_code == 201:
            again = ada.get(answer.headers["location"])
            check(again)
            assert again.json()["name"] == body.get("name")
            assert ada.post(f"{answer.headers['location']}/cancel").status_code == 202
    short = quote(text[:1000], errors="surrogatepass")
    check(ada.post(f"/api/v1/datasets?format=csv&name={short}", content=b"1\n"))
    check(ada.get(f"/api/v1/jobs?q={short}&parent={short}"))
    check(ada.get(f"/api/v1/jobs?label=a:{short}"))


def test_the_log_stays_one_json_object_a_line(populated: PopulatedApi, ada: httpx2.Client):
    for text in NASTY.values():
        short = quote(text[:100], errors="surrogatepass")
        ada.get(f"/api/v1/jobs?q={short}")
        ada.get(f"/api/v1/jobs/{short}")
    lines = populated.api.log.splitlines()
    assert lines
    for line in lines:
        assert isinstance(json.loads(line), dict)
        assert not any(ord(char) < 32 or ord(char) in range(127, 160) for char in line)
        assert "\u202e" not in line
        assert "\u2028" not in line


@pytest.mark.parametrize(
    "name", ["page.html", "picture.svg", "x\u202etxt.exe", 'a"b.html', "ä.csv"]
)
@pytest.mark.parametrize("media", ["text/html", "image/svg+xml", "text/html\r\nX-Evil: 1"])
def test_what_a_job_made_is_downloaded_and_never_shown(
    populated: PopulatedApi, name: str, media: str
):
    """Even if a rank were to name its file so."""
    api = populated.api
    writer = Writer(api.database, None).begin(owner="carl")
    key = f"jobs/{writer.job.id}/1/artifacts/file"
    path = api.settings.artifacts / key
    path.parent.mkdir(parents=True)
    path.write_bytes(b"<script>alert(1)</script>")
    row = {"name": name, "media_type": media, "size_bytes": 25, "key": key}
    writer.ship(Batch(artifacts=[row]))
    with api.client(api.key("carl", "read")) as carl:
        base = f"/api/v1/jobs/{writer.job.id}/artifacts"
        assert carl.get(base).json()["data"][0]["name"] == name
        answer = carl.get(f"{base}/{name}")
    assert answer.status_code in (200, 404), answer.status_code
    if answer.status_code == 200:
        assert answer.headers["content-disposition"].startswith("attachment")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "sandbox" in answer.headers["content-security-policy"] or (
            "default-src 'none'" in answer.headers["content-security-policy"]
        )
        assert "x-evil" not in answer.headers


def test_no_line_of_an_event_forges_a_frame_of_the_stream(populated: PopulatedApi):
    api = populated.api
    writer = Writer(api.database, None).begin(owner="carl")
    lines = [text[:2000] for text in NASTY.values() if "\x00" not in text and text != "\ud800"]
    lines.append("x\n\nevent: end\ndata: {}\n\n")
    writer.ship(
        Batch(events=[NewEvent("log", now(), {"rank": 0, "stream": "stdout", "lines": lines})])
    )
    writer.finish()
    with api.client(api.key("carl", "read")) as carl:
        text = carl.get(f"/api/v1/jobs/{writer.job.id}/stream").text
    frames = [frame for frame in text.replace("\r", "\n").split("\n\n") if frame.strip()]
    kinds = [line for frame in frames for line in frame.split("\n") if line.startswith("event:")]
    assert kinds.count("event: end") == 1
    (log,) = [frame for frame in frames if "event: log" in frame]
    data = json.loads(log.split("data: ", 1)[1])
    assert data["lines"] == lines
