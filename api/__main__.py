"""Serve the API: ``python -m api [--host H] [--port P]``. Prints its address as one JSON line."""

import argparse
import asyncio
import contextlib
import ctypes
import gc
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType

if __name__ == "__main__":
    gc.disable()  # there is no garbage yet, and looking for it takes a sixth of the import time

import uvicorn

from api import process_logs
from api.app import create_app
from api.app_state import AppState
from api.http.connections import connection_of
from api.http.middleware import is_loopback
from api.serving import grpc_server
from glasshouse import jsonio
from glasshouse.lifeline import await_start, follow_lifeline
from glasshouse.unpickling import refuse_unpickling
from models import keys, startup
from models.database import Database
from models.settings import Settings

STALLED_MS = 60_000
_OTHER_FILES = 1000
_M_ARENA_MAX, _NUM_ARENAS = -8, 2
STOP_S = 5
"""Connections still open this long after the first signal are closed."""
_END_S = STOP_S + 15
"""The API exits within this time after its lifeline is cut, even if something blocks."""


class Server(uvicorn.Server):
    """Ends open streams on a signal, because uvicorn waits for them before the app's shutdown."""

    def __init__(self, config: uvicorn.Config, resources: AppState) -> None:
        super().__init__(config)
        self._resources = resources
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then print the address."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started and sockets:
            sys.stdout.write(jsonio.dumps({"url": _url(sockets[0])}) + "\n")
            sys.stdout.flush()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down gracefully; a second Ctrl-C exits at once.

        Unlike uvicorn's handler, it does not raise the signal again: a graceful shutdown is no
        failure.
        """
        del frame
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._resources.drain)
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def main(arguments: Sequence[str]) -> int:
    """Run until a signal arrives or the parent process ends."""
    parser = argparse.ArgumentParser(prog="python -m api", description="Serve the Glasshouse API.")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    given = parser.parse_args(arguments)
    await_start()
    settings = Settings()
    host = given.host or settings.host
    settings = settings.model_copy(update={"host": host})
    if problem := refuse_to_start(settings) or refuse_to_bind(host, settings):
        sys.stderr.write(problem + "\n")
        return 2
    process_logs.configure()
    share_memory()
    _allow_files(settings.max_connections)
    refuse_unpickling()
    listener = _listen(host, settings.port if given.port is None else given.port)
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        http=connection_of(settings),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=STOP_S,
        proxy_headers=settings.behind_proxy,
        forwarded_allow_ips=settings.forwarded_allow_ips,
        lifespan="on",
    )
    server = Server(config, app.state.resources)
    follow_lifeline(lambda: server.handle_exit(signal.SIGTERM, None), within_s=_END_S)
    gc.freeze()
    gc.enable()
    server.run(sockets=[listener])
    return 0


def refuse_to_start(settings: Settings) -> str | None:
    """Return why the API may not serve the stored data, or cannot; None: it may."""
    if settings.grpc_port is not None and not grpc_server.is_available():
        return grpc_server.MISSING
    database = Database(settings.database)
    try:
        return startup.refusal(settings, database)
    finally:
        database.close()


def refuse_to_bind(host: str, settings: Settings) -> str | None:
    """Return why the API may not listen on the host; None: it may."""
    if is_loopback(host):
        return None
    if not settings.behind_proxy:
        return (
            f"{host} can be reached from other machines: put a TLS proxy before the API and set "
            "GLASSHOUSE_BEHIND_PROXY=1, or bind 127.0.0.1"
        )
    database = Database(settings.database)
    with database.read() as tx:
        some = keys.find(tx, after=None, limit=1)
    database.close()
    if not some:
        return "make an API key first: python -m models.keys create --name … --owner …"
    return None


def share_memory() -> None:
    """Limit glibc's memory arenas, so that threads share them. Call it before threads start.

    By default each thread gets its own arena and keeps memory that it freed: tens of unused
    megabytes, growing over the first thousands of streams.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such option
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _NUM_ARENAS)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: disconnects a client that reads nothing
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_MS)
    listener.bind((host, port))
    return listener


def _allow_files(max_connections: int) -> None:
    """Raise the soft limit of open files for the connections, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
