"""The card that a notebook shows."""

import asyncio
import math
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import glasshouse as gh
from glasshouse.client.monitoring.job_card import Card, sparkline
from tests.stub_api import Serve, answer, job, job_of, problem

Connect = Callable[..., gh.Client]
LOSS = {"last": 0.31, "min": 0.29, "first_nonfinite_step": 7}


def html(**fields: Any) -> str:
    return Card(job(**fields), "http://127.0.0.1:8420", [(0, 2.0), (1, 1.0)])._repr_html_()


def tree(text: str) -> ET.Element:
    """The card read as strict XML, which nothing unescaped survives."""
    return ET.fromstring(text.replace("<br>", "<br/>"))  # noqa: S314 (our own)


def test_a_card_says_state_progress_figures_devices_and_leads_to_the_job():
    found = tree(html())
    text = "".join(found.itertext())
    for told in ("mnist", "running", "step 410 of 1000", "epoch 0", "12 s left", "loss 0.31"):
        assert told in text
    assert "on host-a/cpu:0" in text
    assert found.find(".//a").attrib["href"] == "http://127.0.0.1:8420/jobs/job_1"
    assert float(found.find(".//progress").attrib["value"]) == 0.41
    assert "NaN" not in text


def test_a_loss_that_was_no_number_has_a_badge_with_its_first_step():
    assert "NaN since step 7" in html(summary={"loss": LOSS})


def test_nothing_of_a_job_becomes_markup_and_nothing_is_loaded_or_run():
    evil = '<script>alert("1")</script><img src=x onerror=y>'
    device = {"worker": evil, "kind": "cpu", "id": evil}
    error = {"message": evil, "hint": evil}
    text = html(name=evil, state=evil, summary={evil: {"last": 1.0}}, devices=[device], error=error)
    names = {element.tag for element in tree(text).iter()}
    assert names <= {"div", "b", "a", "br", "progress", "svg", "polyline", "path", "span"}
    attributes = {name for element in tree(text).iter() for name in element.attrib}
    of_svg = {"viewBox", "width", "height", "role", "aria-label", "points", "fill", "d"}
    known = {"style", "href", "target", "rel", "max", "value", "stroke", "stroke-width", *of_svg}
    assert attributes <= known
    styles = [element.attrib.get("style", "") for element in tree(text).iter()]
    assert not any("url(" in style for style in styles)


def test_a_job_that_has_not_begun_and_one_that_failed_have_a_card():
    bare = job(state="queued", progress=None, summary={}, devices=[], name=None)
    assert "job_1" in "".join(tree(Card(bare, "http://x")._repr_html_()).itertext())
    failed = html(state="failed", error={"message": "The loss is NaN.", "hint": "Lower lr."})
    assert "The loss is NaN.<br>Lower lr." in failed


def test_the_line_has_its_extremes_at_its_edges_and_crosses_where_values_are_not_finite():
    points = [(0, 4.0), (10, math.nan), (20, 2.0), (30, math.inf), (40, 1.0), (50, 3.0)]
    drawn = tree(sparkline(points))
    lines = [line.attrib["points"].split() for line in drawn.findall("polyline")]
    assert [len(line) for line in lines] == [1, 1, 2]
    assert lines[0] == ["4.0,4.0"]
    assert lines[2][0].endswith(",44.0")
    assert drawn.find("path").attrib["d"].count("M") == 2
    assert drawn.attrib["aria-label"] == "loss from 4 to 3, min 1, 2 NaN or Inf values"


def test_a_long_line_is_thinned_but_for_what_is_nan_or_inf():
    points = [(step, math.nan if step == 7_777 else 1.0 / (step + 1)) for step in range(100_000)]
    text = sparkline(points)
    assert len(text) < 10_000
    assert text.count("M") == 1
    assert sparkline([]) == sparkline([(0, 1.0)]) == sparkline([(0, math.nan), (1, math.nan)]) == ""


def service(state: str, asked: list[str]) -> list[Route]:
    columns = {"step": [0, 1], "epoch": [0, 0], "values": {"loss": [2.0, 1.0]}}

    def answering(body: Any) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            asked.append(request.url.path)
            return answer(body)

        return endpoint

    return [
        Route("/api/v1/jobs/job_1", answering(job(state=state))),
        Route("/api/v1/jobs/job_1/metrics/query", answering(columns)),
    ]


def test_a_card_is_read_with_the_line_of_the_loss(connect: Connect):
    card = job_of(connect(*service("running", []))).card()
    assert list(card.loss) == [(0, 2.0), (1, 1.0)]
    assert "<svg" in card._repr_html_()


def test_the_blocking_job_reads_itself_to_be_shown_and_the_awaited_shows_what_it_has(
    connect: Connect,
):
    asked: list[str] = []
    found = job_of(connect(*service("succeeded", asked)))
    text = found._repr_html_()
    is_blocking = type(found) is gh.Job
    assert ("<svg" in text) == ("succeeded" in text) == bool(asked) == is_blocking
    assert "mnist" in text


def test_a_service_that_is_unavailable_does_not_keep_a_job_from_being_shown():
    with gh.Client("http://127.0.0.1:1", "k", max_retries=0) as client:
        assert "mnist" in job_of(client)._repr_html_()


class Shown:
    """What a notebook shows in one place."""

    def __init__(self) -> None:
        self.cards: list[Card] = []

    def display(self, card: Card, *, display_id: bool) -> "Shown":
        assert display_id
        self.cards.append(card)
        return self

    def update(self, card: Card) -> None:
        self.cards.append(card)


def in_notebook(monkeypatch: pytest.MonkeyPatch) -> Shown:
    shown = Shown()
    shell = SimpleNamespace(kernel=object())
    display = SimpleNamespace(display=shown.display)
    ipython = SimpleNamespace(get_ipython=lambda: shell, display=display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)  # it is no dependency, not even of tests
    return shown


def test_waiting_in_a_notebook_keeps_one_card_up_to_date(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    shown = in_notebook(monkeypatch)
    states = iter(["running", "succeeded"])
    routes = service("running", [])
    routes[0] = Route("/api/v1/jobs/job_1", lambda _: answer(job(state=next(states))))
    job_of(connect(*routes)).wait(progress=True)
    assert [card.job["state"] for card in shown.cards] == ["running", "succeeded"]
    assert capsys.readouterr().err == ""


def test_ipython_in_a_terminal_gets_the_bar(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=None))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    job_of(connect(*service("succeeded", []))).wait(progress=True)
    assert "job_1" in capsys.readouterr().err


@pytest.mark.parametrize("show", ["show", "_ipython_display_"])
def test_a_card_is_updated_while_other_code_runs(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, show: str
):
    shown = in_notebook(monkeypatch)
    states = iter(["running", "running", "succeeded"])
    routes = service("running", [])
    routes[0] = Route("/api/v1/jobs/job_1", lambda _: answer(job(state=next(states))))
    with gh.Client(serve(routes), "gh_test") as client:
        found = job_of(client)
        getattr(found, show)()
        assert shown.cards[0].job["state"] == "running"  # at once, in the cell itself
        while shown.cards[-1].job["state"] != "succeeded":
            time.sleep(0.01)
        assert found.state == "running"  # the job in the hands of the user is left as it was
    assert list(shown.cards[-1].loss) == [(0, 2.0), (1, 1.0)]


def test_an_awaited_job_lives_in_its_own_loop(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    shown = in_notebook(monkeypatch)
    states = iter(["running", "running", "succeeded"])
    routes = service("running", [])
    routes[0] = Route("/api/v1/jobs/job_1", lambda _: answer(job(state=next(states))))

    async def look() -> None:
        async with gh.AsyncClient(serve(routes), "gh_test") as client:
            found = await client.jobs.get("job_1")
            found.show()
            while shown.cards[-1].job["state"] != "succeeded":  # noqa: ASYNC110 (a notebook tells nobody)
                await asyncio.sleep(0.01)

    asyncio.run(look())
    assert len(shown.cards) == 3


def test_a_card_of_a_service_that_was_unavailable_continues(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("glasshouse.client.blocking.job.RETRY_S", 0.0)
    shown = in_notebook(monkeypatch)
    answers = iter([problem(503), answer(job(state="running")), problem(500), problem(404)])
    routes = service("running", [])
    routes[0] = Route("/api/v1/jobs/job_1", lambda _: next(answers))
    before = set(threading.enumerate())
    with gh.Client(serve(routes), "gh_test", max_retries=0) as client:
        job_of(client).show()
        for thread in set(threading.enumerate()) - before:
            thread.join(30)
    assert [card.job["state"] for card in shown.cards] == ["running", "running"]
    assert next(answers, None) is None  # it ended when the job was not there any more


def test_without_a_notebook_a_job_is_shown_as_a_line(
    serve: Serve, capsys: pytest.CaptureFixture[str]
):
    with gh.Client(serve(service("running", [])), "gh_test") as client:
        job_of(client).show()
    assert "job_1" in capsys.readouterr().out
