"""Behind a real proxy that ends TLS: its word counts if it comes from where it should."""

import http.client
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from pydantic import ValidationError

from models.settings import Settings
from tests.contract.test_compose import COMPOSE
from tests.running import Api, running_api

BRIDGE = "127.0.0.2"
"""Another address of this machine, as the gateway of docker's bridge is to a container."""


@contextmanager
def proxy(upstream: str) -> Generator[str]:
    """A proxy that comes from `BRIDGE` and says that it was asked by https; its URL."""
    port = urlsplit(upstream).port

    class Pass(BaseHTTPRequestHandler):
        def _pass(self) -> None:
            there = http.client.HTTPConnection("127.0.0.1", port, source_address=(BRIDGE, 0))
            headers = dict(self.headers.items()) | {"Host": f"localhost:{port}"}
            headers |= {"X-Forwarded-Proto": "https", "X-Forwarded-For": "192.0.2.7"}
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            there.request(self.command, self.path, body, headers)
            answer = there.getresponse()
            content = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
            there.close()

        do_GET = do_POST = _pass  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Pass) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def opened(api: Api, door: str) -> tuple[str, str]:
    """The link that is made through this door, and the cookie that it sets."""
    headers = {"Authorization": f"Bearer {api.admin}"}
    with httpx2.Client(base_url=door) as client:
        link = client.post("/api/v1/tickets", headers=headers).json()["url"]
        path = link.partition("/open?")[2]
        return link, client.get(f"/open?{path}").headers["set-cookie"]


@pytest.mark.parametrize(
    "allowed",
    [
        f"127.0.0.1, {BRIDGE}/32",
        pytest.param(BRIDGE, marks=pytest.mark.slow),
        pytest.param("*", marks=pytest.mark.slow),
    ],
)
def test_a_proxy_of_a_known_address_says_that_it_was_https(allowed: str):
    with running_api(behind_proxy="true", forwarded_allow_ips=allowed) as api:
        with proxy(api.url) as door:
            link, cookie = opened(api, door)
        assert link.startswith("https://localhost")
        assert "Secure" in cookie.split("; ")


@pytest.mark.parametrize(
    "settings",
    [
        {"behind_proxy": "true", "forwarded_allow_ips": "192.0.2.0/24"},
        pytest.param({"behind_proxy": "true"}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
    ],
)
def test_the_proxy_header_of_other_addresses_is_ignored(settings: dict[str, str]):
    with running_api(**settings) as api:
        with proxy(api.url) as door:
            link, cookie = opened(api, door)
        assert link.startswith("http://localhost")
        assert "Secure" not in cookie.split("; ")


def test_the_compose_file_believes_the_bridge_of_docker():
    given = COMPOSE["services"]["api"]["environment"]["GLASSHOUSE_FORWARDED_ALLOW_IPS"]
    networks = given.partition(":-")[2].removesuffix("}")
    Settings(forwarded_allow_ips=networks)
    assert {"172.16.0.0/12", "192.168.0.0/16"} <= set(networks.split(","))


@pytest.mark.parametrize("wrong", ["proxy", "172.16.0.0/12,bridge", "", "172.16.0.1/12", "*,::1"])
def test_an_invalid_address_is_refused(wrong: str):
    with pytest.raises(ValidationError, match="no address or network"):
        Settings(forwarded_allow_ips=wrong)
