"""A separate Chromium whose tabs are measured without an attached debugger.

An attached debugger adds to a tab's memory. With Playwright attached, response bodies are kept,
and the renderers grew by 8 MiB a minute; each time it attaches it leaves an isolated world with
its scripts, half a MiB and more. So the tabs are windows of a separate browser: their memory is
read from outside, and a tab is queried in a short debugging session that enables no domain that
keeps data.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.request import Request, urlopen

import psutil
from websockets.sync.client import ClientConnection, connect

from tests.page.browser import FLAGS, SIZES
from tests.waiting import until


@dataclass(frozen=True)
class Chromium:
    """A running Chromium with its own profile."""

    process: psutil.Process
    port: int
    """The port of its debugging protocol, on loopback."""

    @classmethod
    @contextmanager
    def started(cls, path: str) -> Generator[Self]:
        """For the duration of the block."""
        profile = Path(tempfile.mkdtemp(prefix="gh-", dir="/tmp"))
        size = f"--window-size={SIZES['wide'][0]},{SIZES['wide'][1]}"
        own = ("--headless", "--remote-debugging-port=0", f"--user-data-dir={profile}", size)
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([path, *FLAGS, *own, "about:blank"], **quiet) as process:
            try:
                port = until(lambda: _port(profile), what="Chromium's start")
                yield cls(psutil.Process(process.pid), port)
            finally:
                process.terminate()
                process.wait(timeout=60)
        shutil.rmtree(profile, ignore_errors=True)

    @property
    def version(self) -> str:
        """Its version number."""
        return self._asked("version")["Browser"].partition("/")[2]

    @property
    def windows(self) -> dict[str, str]:
        """The URLs of open windows, by id."""
        return {one["id"]: one["url"] for one in self._asked("list") if one["type"] == "page"}

    def open(self, url: str) -> str:
        """Open a new window, since a background tab is hidden; return its id."""
        asked = {"url": url, "newWindow": True}
        with Session.with_(self._asked("version")["webSocketDebuggerUrl"]) as session:
            return session.call("Target.createTarget", asked)["targetId"]

    def close(self, window: str) -> None:
        """Close a window."""
        with urlopen(f"{self._address}/json/close/{window}"):  # noqa: S310 (loopback)
            pass

    def ask(self, window: str, *methods: str) -> list[dict[str, Any]]:
        """The results of methods, in a temporary session."""
        with self._session(window) as session:
            return [session.call(method) for method in methods]

    def evaluate(self, window: str, function: str) -> Any:
        """The result of a function without parameters in the page; promises are awaited."""
        asked = {"expression": f"({function})()", "awaitPromise": True, "returnByValue": True}
        with self._session(window) as session:
            answer = session.call("Runtime.evaluate", asked)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    @contextmanager
    def offline(self, *windows: str) -> Generator[None]:
        """Without network for the duration of the block."""
        none = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        with ExitStack() as sessions:
            for window in windows:
                session = sessions.enter_context(self._session(window))
                session.call("Network.enable")
                session.call("Network.emulateNetworkConditions", none)
            yield

    def said(self, window: str) -> list[str]:
        """Console errors and exceptions since it was opened; the browser buffers them."""
        with self._session(window) as session:
            session.call("Log.enable")
            session.call("Runtime.enable")
            return [text for event in session.events if (text := _complaint(event))]

    @property
    def renderers(self) -> list[psutil.Process]:
        """The renderer processes of all windows."""
        return [one for one in self.process.children(recursive=True) if _is_renderer(one)]

    @property
    def renderers_mib(self) -> float:
        """Their unique set size, read from outside."""
        return sum(one.memory_full_info().uss for one in self.renderers) / 2**20

    @contextmanager
    def asleep(self) -> Generator[None]:
        """Suspend the renderers for the duration of the block, as when the machine sleeps."""
        stopped = self.renderers
        try:
            for process in stopped:
                process.suspend()
            yield
        finally:
            for process in stopped:
                process.resume()

    @property
    def _address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _asked(self, what: str) -> Any:
        with urlopen(Request(f"{self._address}/json/{what}")) as answer:  # noqa: S310 (loopback)
            return json.load(answer)

    def _session(self, window: str) -> AbstractContextManager["Session"]:
        return Session.with_(f"ws://127.0.0.1:{self.port}/devtools/page/{window}")


@dataclass
class Session:
    """Sequential calls of the debugging protocol."""

    socket: ClientConnection
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The events before the last response."""
    num_calls: int = 0

    @classmethod
    @contextmanager
    def with_(cls, address: str) -> Generator[Self]:
        """For the duration of the block."""
        with connect(address, max_size=None, ping_interval=None) as socket:  # pings get no answer
            yield cls(socket)

    def call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """The result of a call."""
        self.num_calls += 1
        asked = {"id": self.num_calls, "method": method, "params": params or {}}
        self.socket.send(json.dumps(asked))
        while "id" not in (message := json.loads(self.socket.recv(timeout=90))):
            self.events.append(message)
        assert "error" not in message, (method, message)
        return message["result"]


def _is_renderer(process: psutil.Process) -> bool:
    try:
        return "--type=renderer" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a closed window
        return False


def _complaint(event: dict[str, Any]) -> str | None:
    about = event["params"]
    match event["method"]:
        case "Log.entryAdded" if about["entry"]["level"] == "error":
            return f"console: {about['entry']['text']} ({about['entry'].get('url', '')})"
        case "Runtime.consoleAPICalled" if about["type"] in {"error", "assert"}:
            values = [one.get("description", one.get("value")) for one in about["args"]]
            return f"console: {values}"
        case "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            return f"exception: {details.get('exception', details).get('description', details)}"
        case _:
            return None


def _port(profile: Path) -> int | None:
    place = profile / "DevToolsActivePort"
    lines = place.read_text().split() if place.exists() else []
    return int(lines[0]) if lines else None
