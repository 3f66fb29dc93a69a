"""A Chromium of our own that nobody inspects while its tabs are watched.

What inspects a tab is part of what the tab weighs. With Playwright attached the bodies of answers
are kept, and the renderers grew by 8 MiB a minute; each time that it is attached it leaves a world
of its own with its scripts, half a MiB and more. So the tabs are windows of a browser that was
started for itself: what they have in memory is read from outside, and what is asked of a tab is
asked in a session that turns on nothing which keeps anything, and ends with the answer.
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
    """One that runs, with a profile of its own."""

    process: psutil.Process
    port: int
    """On loopback, of its debugging protocol."""

    @classmethod
    @contextmanager
    def started(cls, path: str) -> Generator[Self]:
        """For as long as the block lasts."""
        profile = Path(tempfile.mkdtemp(prefix="gh", dir="/tmp"))
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
        """Its number."""
        return self._asked("version")["Browser"].partition("/")[2]

    @property
    def windows(self) -> dict[str, str]:
        """The addresses of what is open, by id."""
        return {one["id"]: one["url"] for one in self._asked("list") if one["type"] == "page"}

    def open(self, url: str) -> str:
        """A window of its own, for a tab behind others is hidden; its id."""
        asked = {"url": url, "newWindow": True}
        with Session.with_(self._asked("version")["webSocketDebuggerUrl"]) as session:
            return session.call("Target.createTarget", asked)["targetId"]

    def close(self, window: str) -> None:
        """No longer show it."""
        with urlopen(f"{self._address}/json/close/{window}"):  # noqa: S310 (loopback)
            pass

    def ask(self, window: str, *methods: str) -> list[dict[str, Any]]:
        """What it answers; nobody is attached to it before and after."""
        with self._session(window) as session:
            return [session.call(method) for method in methods]

    def evaluate(self, window: str, function: str) -> Any:
        """What a function of no parameters gives in the page; of a promise, what comes of it."""
        asked = {"expression": f"({function})()", "awaitPromise": True, "returnByValue": True}
        with self._session(window) as session:
            answer = session.call("Runtime.evaluate", asked)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    @contextmanager
    def offline(self, *windows: str) -> Generator[None]:
        """While the block lasts they have no network."""
        none = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        with ExitStack() as sessions:
            for window in windows:
                session = sessions.enter_context(self._session(window))
                session.call("Network.enable")
                session.call("Network.emulateNetworkConditions", none)
            yield

    def said(self, window: str) -> list[str]:
        """Errors and exceptions in the console since it was opened; the browser keeps them."""
        with self._session(window) as session:
            session.call("Log.enable")
            session.call("Runtime.enable")
            return [told for event in session.events if (told := _complaint(event))]

    @property
    def renderers(self) -> list[psutil.Process]:
        """The processes behind all windows."""
        return [one for one in self.process.children(recursive=True) if _is_renderer(one)]

    @property
    def renderers_mib(self) -> float:
        """What they have in memory for themselves, read from outside."""
        return sum(one.memory_full_info().uss for one in self.renderers) / 2**20

    @contextmanager
    def asleep(self) -> Generator[None]:
        """While the block lasts the windows stand still, as when the machine sleeps."""
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
    """Calls of the debugging protocol, one after the other."""

    socket: ClientConnection
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """What came before the last answer."""
    num_calls: int = 0

    @classmethod
    @contextmanager
    def with_(cls, address: str) -> Generator[Self]:
        """For as long as the block lasts."""
        with connect(address, max_size=None, ping_interval=None) as socket:  # pings get no answer
            yield cls(socket)

    def call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """What it answers."""
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
    except psutil.NoSuchProcess:  # a window that was closed
        return False


def _complaint(event: dict[str, Any]) -> str | None:
    about = event["params"]
    match event["method"]:
        case "Log.entryAdded" if about["entry"]["level"] == "error":
            return f"console: {about['entry']['text']} ({about['entry'].get('url', '')})"
        case "Runtime.consoleAPICalled" if about["type"] in {"error", "assert"}:
            told = [one.get("description", one.get("value")) for one in about["args"]]
            return f"console: {told}"
        case "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            return f"exception: {details.get('exception', details).get('description', details)}"
        case _:
            return None


def _port(profile: Path) -> int | None:
    place = profile / "DevToolsActivePort"
    told = place.read_text().split() if place.exists() else []
    return int(told[0]) if told else None
