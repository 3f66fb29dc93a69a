"""The outbound door against real servers on loopback and a resolver that changes its mind."""

import socket
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from models.access.addresses import AddressRefused, Allowed
from worker.delivery.outbound import OutboundFailed, Reply, RequestLimits, send

LOOPBACK = Allowed.of("127.0.0.0/8")


class Receiver(ThreadingHTTPServer):
    """Records the requests and sends the configured answers."""

    daemon_threads = True

    def __init__(self, status: int = 200, **headers: str) -> None:
        self.status, self.headers, self.body = status, headers, b"thank you"
        self.got: list[tuple[str, str, dict[str, str], bytes]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://hook.example:{self.server_port}/in"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.got.append((self.command, self.path, dict(self.headers), body))
        self.send_response(self.server.status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@contextmanager
def receiver(status: int = 200, **headers: str) -> Generator[Receiver]:
    server = Receiver(status, **headers)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Resolver:
    """Gives one answer after the other, and the last one for ever."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self.answers[min(len(self.asked), len(self.answers)) - 1]


def post(url: str, resolver: Callable[..., Any], allowed: Allowed = LOOPBACK, **more: Any) -> Reply:
    headers = {"Authorization": "Bearer x", "X-Mine": "1"}
    return send(url, body=b"{}", headers=headers, allowed=allowed, resolve=resolver, **more)


def test_a_request_arrives_whole_under_the_name_of_its_host():
    with receiver() as server:
        reply = post(server.url + "?a=b", Resolver(["127.0.0.1"]))
    assert (reply.status, reply.body) == (200, b"thank you")
    ((method, path, headers, body),) = server.got
    assert (method, path, body) == ("POST", "/in?a=b", b"{}")
    assert headers["Host"] == f"hook.example:{server.server_port}"


def test_a_host_name_is_resolved_once_and_the_checked_address_is_used():
    with receiver() as server:
        rebinding = Resolver(["127.0.0.1"], ["127.0.0.9"])
        assert post(server.url, rebinding).status == 200
        assert rebinding.asked == ["hook.example"]
        turned = Resolver(["127.0.0.1"], ["10.0.0.1"])
        only_here = Allowed.of("127.0.0.1")
        assert post(server.url, turned, only_here).status == 200
        with pytest.raises(AddressRefused, match=r"10\.0\.0\.1"):
            post(server.url, turned, only_here)
    assert len(server.got) == 2


@pytest.mark.parametrize("answer", [["127.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["::ffff:127.0.0.1"]])
def test_an_address_inside_is_refused_before_anything_is_sent(answer: list[str]):
    with receiver() as server, pytest.raises(AddressRefused):
        post(server.url, Resolver(answer), Allowed())
    assert server.got == []


@pytest.mark.parametrize("host", ["127.0.0.1", "2130706433", "0x7f.1", "127.1", "localhost"])
def test_no_spelling_of_loopback_gets_through_the_systems_resolver(host: str):
    with receiver() as server, pytest.raises((AddressRefused, OutboundFailed)):
        send(f"http://{host}:{server.server_port}/", body=b"", headers={}, allowed=Allowed())
    assert server.got == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirection_is_given_as_it_is_and_not_followed(status: int):
    with receiver() as second, receiver(status, Location=second.url) as first:
        assert post(first.url, Resolver(["127.0.0.1"])).status == status
        assert second.got == []
    assert len(first.got) == 1


def test_of_a_long_answer_only_the_beginning_is_read():
    with receiver() as server:
        server.body = bytes(1_000_000)
        reply = post(server.url, Resolver(["127.0.0.1"]), limits=RequestLimits(max_bytes=1000))
    assert len(reply.body) == 1000


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n",  # then the client gives up its socket
    ],
)
def test_a_server_that_trickles_is_cut_off(line: bytes):
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(line or b"H")
                while not over.wait(0.05):
                    try:
                        connection.sendall(b"x")
                    except OSError:
                        return

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        with pytest.raises(OutboundFailed, match=r"longer than 0\.5 s"):
            post(f"http://h:{port}/", Resolver(["127.0.0.1"]), limits=RequestLimits(total_s=0.5))
        over.set()
        thread.join(60)


def test_a_resolver_that_hangs_times_out():
    over = threading.Event()

    def hang(host: str, port: int) -> Sequence[str]:
        over.wait(60)
        return ["127.0.0.1"]

    with pytest.raises(OutboundFailed, match="longer"):
        post("http://h:1/", hang, limits=RequestLimits(total_s=0.2))
    over.set()


def test_a_refused_connection_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(OutboundFailed, match="takes no connection"):
        post(f"http://h:{port}/", Resolver(["127.0.0.1"]))


def test_an_answer_that_is_no_http_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"-ERR unknown command\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        with pytest.raises(OutboundFailed, match="did not answer"):
            post(f"http://h:{port}/", Resolver(["127.0.0.1"]))
        thread.join(60)
