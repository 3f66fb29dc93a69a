"""X14: heads, bodies, connections: too long, too many or too slow. Time and memory hold."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Generator

import psutil
import pytest

from tests.running import Api, running_api
from tests.security.raw import Raw, closed_after, connect, one_status, read_all
from tests.waiting import until

HEAD = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
GROWTH_BYTES = 48 * 1024**2
"""More than that and something was kept. Python gives little back of what it took once."""


@pytest.fixture(scope="module")
def hasty() -> Generator[Api]:
    """An API that waits for nothing long."""
    with running_api(
        head_timeout_s="1",
        body_timeout_s="1",
        max_json_bytes="100000",
        max_upload_bytes="1000000",
        max_connections="150",
    ) as api:
        yield api


def memory(api: Api) -> int:
    return psutil.Process(api.process.pid).memory_info().rss


def is_well(api: Api) -> bool:
    with api.client() as client:
        return client.get("/livez").status_code == 200


def authorized(api: Api, *lines: bytes) -> bytes:
    key = b"Authorization: Bearer " + api.admin.encode()
    return b"\r\n".join([*lines, b"Host: localhost", key, b""])


@pytest.mark.parametrize("sent", [b"", b"G", HEAD, b"GET /livez HTTP/1.1\r\nX: "])
def test_a_request_head_that_does_not_arrive_times_out(hasty: Api, sent: bytes):
    with connect(hasty.url) as connection:
        connection.sendall(sent)
        answer = read_all(connection)
    assert b" 408 " in answer.split(b"\r\n")[0]
    assert json.loads(answer.split(b"\r\n\r\n")[1])["code"] == "request_timeout"


def test_a_head_that_trickles_is_cut_off_after_the_same_time(hasty: Api):
    with connect(hasty.url) as connection:
        connection.sendall(HEAD)
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() < began + 60:
                connection.sendall(b"X-A: b\r\n")
                time.sleep(0.05)
        assert time.monotonic() - began < 60, "the request was not cut off"
    assert is_well(hasty)


def test_the_next_head_on_a_connection_has_its_own_time(hasty: Api):
    with connect(hasty.url) as connection:
        for _ in range(3):
            connection.sendall(HEAD + b"\r\n")
            assert one_status(connection) == 200
            time.sleep(0.4)
        connection.sendall(HEAD)
        closed_after(connection)


def test_a_hundred_slow_clients_delay_no_other_and_take_no_memory(hasty: Api):
    before = memory(hasty)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(hasty.url)) for _ in range(100)]
        for connection in slow:
            connection.sendall(HEAD)
        with hasty.client() as client:
            for _ in range(20):
                assert client.get("/livez").status_code == 200
        for connection in slow:
            read_all(connection)
    assert memory(hasty) - before < GROWTH_BYTES


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /livez?" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        HEAD + b"X-Long: " + b"x" * 100_000 + b"\r\n\r\n",
        HEAD + b"".join(b"X-%d: y\r\n" % number for number in range(500)) + b"\r\n",
        HEAD + b"X-Endless: " + b"x" * 5_000_000,
        HEAD + b"".join(b"X-%d: y\r\n" % number for number in range(500_000)),
    ],
    ids=["path", "query", "header", "many headers", "endless header", "endless headers"],
)
def test_a_head_that_is_too_large_is_refused(hasty: Api, head: bytes):
    before = memory(hasty)
    with connect(hasty.url) as connection:
        with contextlib.suppress(OSError):  # it closes before it has all of an endless one
            connection.sendall(head)
        answer = read_all(connection)
    if answer:  # a reset may have overtaken it
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b'"headers_too_large"' in answer
    assert memory(hasty) - before < GROWTH_BYTES
    assert is_well(hasty)


def test_a_request_head_within_the_limits_is_accepted(hasty: Api):
    headers = {f"X-{number}": "y" * 300 for number in range(150)}
    with Raw(hasty.url, hasty.admin) as raw:
        assert raw.ask("GET", "/api/v1/jobs?q=" + "x" * 200, headers).status == 200


@pytest.mark.parametrize(
    "head",
    [
        b"POST /api/v1/jobs HTTP/1.1\r\nContent-Length: -1\r\n",
        b"POST /api/v1/jobs HTTP/1.1\r\nContent-Length: 5x\r\n",
        b"POST /api/v1/jobs HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n",
        b"POST /api/v1/jobs HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"POST /api/v1/jobs HTTP/1.1\r\nTransfer-Encoding: gzip\r\n",
        b"POST /api/v1/jobs HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n",
        b"POST /api/v1/jobs HTTP/1.1\r\nContent-Length: 99999999999999999999999999\r\n",
        b"GET /api/v1/jobs HTTP/9.9\r\n",
        b"GET  /api/v1/jobs\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n",
        b"GET http://evil.example/api/v1/jobs HTTP/1.1\r\nHost: evil.example\r\n",
        b"CONNECT 127.0.0.1:22 HTTP/1.1\r\n",
        b"GET /api/v1/jobs HTTP/1.1\r\nX-A : b\r\n",
        b"GET /api/v1/jobs HTTP/1.1\r\nX-A: b\r\n folded\r\n",
    ],
)
def test_invalid_http_is_refused_and_smuggles_nothing(hasty: Api, head: bytes):
    smuggled = b"GET /api/v1/keys HTTP/1.1\r\n" + authorized(hasty) + b"\r\n"
    with connect(hasty.url) as connection:
        connection.sendall(head + authorized(hasty) + b"\r\n" + smuggled)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    first = answer.split(b"\r\n")[0]
    assert first.startswith(b"HTTP/1.1 4") or not first, first  # or closed without a word
    assert b'"object":"list"' not in answer, "the second request was answered"
    assert b"Traceback" not in answer
    assert is_well(hasty)


@pytest.mark.parametrize("path", ["/api/v1/jobs", "/api/v1/plan", "/api/v1/datasets?format=csv"])
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_body_that_does_not_arrive_times_out(hasty: Api, path: str, framing: str):
    length = b"Content-Length: 5000" if framing == "length" else b"Transfer-Encoding: chunked"
    head = authorized(
        hasty, f"POST {path} HTTP/1.1".encode(), b"Content-Type: application/octet-stream", length
    )
    if "csv" not in path:
        head = head.replace(b"octet-stream", b"json")
    with connect(hasty.url) as connection:
        connection.sendall(head + b"\r\n" + (b"1\r\n{\r\n" if framing == "chunked" else b"{"))
        answer = read_all(connection)
    assert b" 408 " in answer.split(b"\r\n")[0], answer
    assert b'"request_timeout"' in answer


def test_a_body_that_trickles_is_cut_off_and_leaves_no_file(hasty: Api):
    head = authorized(
        hasty, b"POST /api/v1/datasets?format=csv HTTP/1.1", b"Content-Length: 900000"
    )
    with connect(hasty.url) as connection:
        connection.sendall(head + b"\r\n")
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() < began + 60:
                connection.sendall(b"1,")
                time.sleep(0.05)
        assert time.monotonic() - began < 60
    uploads = hasty.settings.artifacts / "uploads"
    until(lambda: not any(uploads.iterdir()) if uploads.exists() else True)


def test_a_body_that_arrives_steadily_can_take_longer(hasty: Api):
    row = b"1,2,3,4\n" * 1000
    head = authorized(
        hasty, b"POST /api/v1/datasets?format=csv HTTP/1.1", b"Content-Length: %d" % (20 * len(row))
    )
    with connect(hasty.url) as connection:
        connection.sendall(head + b"\r\n")
        for _ in range(20):
            connection.sendall(row)
            time.sleep(0.15)
        assert one_status(connection) == 201


@pytest.mark.parametrize("size", [70_000, 900_000])
def test_a_client_that_is_refused_early_can_keep_sending_and_gets_one_response(
    hasty: Api, size: int
):
    """The answer is out before the body is in: the rest is read away, not taken for a head."""
    head = authorized(
        hasty, b"POST /api/v1/datasets?format=none HTTP/1.1", b"Content-Length: %d" % size
    )
    with connect(hasty.url) as connection:
        connection.sendall(head + b"\r\n")
        assert one_status(connection) == 422
        connection.sendall(b"x" * size)
        connection.sendall(HEAD + b"Connection: close\r\n\r\n")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200 OK"), "what follows is the next request's"
    assert answer.count(b"HTTP/1.1 ") == 1


def test_what_is_left_of_a_body_is_not_waited_for_without_end(hasty: Api):
    head = authorized(
        hasty, b"POST /api/v1/datasets?format=none HTTP/1.1", b"Content-Length: 900000"
    )
    with connect(hasty.url) as connection:
        connection.sendall(head + b"\r\n")
        assert one_status(connection) == 422
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() < began + 60:
                connection.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < 60


def test_a_chunked_body_without_an_end_is_refused_in_bounded_memory(hasty: Api):
    before = memory(hasty)
    block = b"100000\r\n" + bytes(0x100000) + b"\r\n"
    for path in ("/api/v1/jobs", "/api/v1/datasets?format=csv"):
        head = authorized(
            hasty,
            f"POST {path} HTTP/1.1".encode(),
            b"Content-Type: application/json" if "jobs" in path else b"X: y",
            b"Transfer-Encoding: chunked",
        )
        with connect(hasty.url) as connection:
            connection.sendall(head + b"\r\n")
            with contextlib.suppress(OSError):
                for _ in range(100):
                    connection.sendall(block)
            answer = read_all(connection)
        assert not answer or b" 413 " in answer.split(b"\r\n")[0]
    assert memory(hasty) - before < GROWTH_BYTES
    assert is_well(hasty)


def test_a_form_is_not_read_at_all(hasty: Api):
    """10,000 parts, or one field of any size: no route takes a form."""
    before = memory(hasty)
    part = b'--b\r\nContent-Disposition: form-data; name="f"\r\n\r\nx\r\n'
    for body, media in (
        (part * 1500 + b"--b--", "multipart/form-data; boundary=b"),
        (b"a=" + b"x" * 90_000, "application/x-www-form-urlencoded"),
    ):
        with Raw(hasty.url, hasty.admin) as raw:
            for path in ("/api/v1/jobs", "/api/v1/plan", "/api/v1/keys"):
                assert raw.ask("POST", path, {"Content-Type": media}, body).status == 415
    assert memory(hasty) - before < GROWTH_BYTES


def test_a_packed_body_is_not_unpacked(hasty: Api):
    import gzip

    body = gzip.compress(b" " * 50_000_000, 1)[:90_000]
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    before = memory(hasty)
    with Raw(hasty.url, hasty.admin) as raw:
        answer = raw.ask("POST", "/api/v1/jobs", headers, body)
    assert (answer.status, json.loads(answer.body)["code"]) == (400, "malformed_json")
    assert memory(hasty) - before < GROWTH_BYTES


def test_more_connections_than_there_may_be_are_closed_and_those_there_are_continue(hasty: Api):
    with contextlib.ExitStack() as stack, hasty.client() as client:
        assert client.get("/livez").status_code == 200  # connected before the crowd
        crowd = [stack.enter_context(connect(hasty.url)) for _ in range(300)]
        assert client.get("/livez").status_code == 200
        open_ = len(psutil.Process(hasty.process.pid).net_connections("tcp"))
        assert open_ < 250
        del crowd
    until(lambda: is_well_now(hasty))


def is_well_now(api: Api) -> bool:
    with contextlib.suppress(Exception):
        return is_well(api)
    return False


def test_a_connection_reset_in_the_middle_leaves_nothing(hasty: Api):
    process = psutil.Process(hasty.process.pid)
    until(lambda: len(process.net_connections("tcp")) < 5)
    before = process.num_fds()

    def cut() -> None:
        for _ in range(50):
            with connect(hasty.url) as connection:
                connection.sendall(
                    authorized(hasty, b"POST /api/v1/jobs HTTP/1.1", b"Content-Length: 50")
                )
                linger = b"\1\0\0\0\0\0\0\0"
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    threads = [threading.Thread(target=cut) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: process.num_fds() <= before + 2)
