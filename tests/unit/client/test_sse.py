"""The decoder of server-sent events, against the rules of the HTML standard."""

import pytest

from glasshouse.client.connection.sse import Decoder, Message

STREAM = (
    "\ufeff: ping\r\n"
    "retry: 1500\r\n"
    'id: 1\r\nevent: state\r\ndata: {"to":"läuft"}\r\n\r\n'
    "data: two\ndata:lines\ndata:  indented\n\n"
    "id: 3\rdata\r\r"
    ":only a comment\n\n"
    "event: ignored because it has no data\n\n"
    "id: bad\0id\nunknown: field\ndata: 4\n\n"
    "id\ndata: id is empty now\n\n"
    "data: unfinished\n"
).encode()
MESSAGES = [
    Message("state", '{"to":"läuft"}', "1"),
    Message("message", "two\nlines\n indented", "1"),
    Message("message", "", "3"),
    Message("message", "4", "3"),
    Message("message", "id is empty now", ""),
]


def decode(*chunks: bytes) -> list[Message]:
    decoder = Decoder()
    return [message for chunk in chunks for message in decoder.feed(chunk)]


def test_a_stream_is_decoded_as_the_standard_says():
    assert decode(STREAM) == MESSAGES


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_a_cut_at_any_byte_changes_nothing(cut: int):
    assert decode(STREAM[:cut], STREAM[cut:]) == MESSAGES


def test_a_stream_that_comes_byte_by_byte_is_the_same():
    assert decode(*(STREAM[n : n + 1] for n in range(len(STREAM)))) == MESSAGES


def test_a_line_feed_after_a_split_carriage_return_does_not_end_an_event():
    assert decode(b"data: a\r", b"\ndata: b\n\n") == [Message("message", "a\nb", "")]


def test_a_blank_line_after_a_split_carriage_return_ends_the_event():
    assert decode(b"data: a\r", b"\n", b"\n") == [Message("message", "a", "")]


@pytest.mark.parametrize(
    ("text", "retry_ms"), [("20", 20), ("-1", None), ("1e3", None), ("²", None)]
)
def test_only_digits_set_the_reconnection_time(text: str, retry_ms: int | None):
    decoder = Decoder()
    decoder.feed(f"retry: {text}\n".encode())
    assert decoder.retry_ms == retry_ms
