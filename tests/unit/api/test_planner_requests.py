"""Cursors, types and formats as clients write them."""

import pytest
from fastapi import Request

from api.http import negotiation
from api.http.cursors import pairs_of, seq_of, types_of
from glasshouse.errors import InvalidCursor, InvalidRequest, NotAcceptable

OFFERS = {"application/json": "json", "text/csv": "csv"}


def asking(accept: str | None) -> Request:
    headers = [] if accept is None else [(b"accept", accept.encode("latin-1"))]
    return Request({"type": "http", "headers": headers})


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (None, "json"),
        ("*/*", "json"),
        ("text/csv, */*", "csv"),
        ("text/csv", "csv"),
        ("text/*", "csv"),
        ("application/json;q=0.5, text/csv", "csv"),
        ("text/csv;q=0.5, */*;q=0.1", "csv"),
        ("text/csv;q=0, */*", "json"),
        ("TEXT/CSV ; charset=utf-8", "csv"),
    ],
)
def test_the_client_gets_the_format_that_it_likes_best(accept: str | None, wanted: str) -> None:
    assert negotiation.choose(asking(accept), OFFERS) == wanted


@pytest.mark.parametrize("accept", ["application/vnd.apache.arrow.stream", "x", "*/*;q=x", ";;,,"])
def test_an_unknown_format_is_refused_with_the_available_ones(accept: str) -> None:
    with pytest.raises(NotAcceptable) as refused:
        negotiation.choose(asking(accept), OFFERS)
    assert refused.value.context["formats"] == list(OFFERS)


def test_a_cursor_is_an_event_of_the_log() -> None:
    assert [seq_of(text, 5) for text in (None, "", "0", "5", "05")] == [0, 0, 0, 5, 5]
    for text in ("6", "-1", "9" * 30, "1 ", "0x1", "1\r\n"):
        with pytest.raises(InvalidCursor):
            seq_of(text, 5)


def test_pairs_name_jobs_of_the_stream() -> None:
    assert pairs_of("a:1,b:2", ["a", "b", "c"]) == {"a": "1", "b": "2"}
    for text in ("a:1,a:2", "d:1", "a:1,", ",", "1"):
        with pytest.raises(InvalidCursor):
            pairs_of(text, ["a", "b", "c"])


def test_types_are_those_of_the_events() -> None:
    assert types_of(None) is None
    assert types_of(["metrics,state", "end"]) == {"metrics", "state", "end"}
    with pytest.raises(InvalidRequest):
        types_of(["metrics,hello\r\nid: 3"])
