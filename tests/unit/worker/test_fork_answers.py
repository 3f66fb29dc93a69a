"""An answer of the fork server that comes at the very moment its deadline passes."""

import os
import socket
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from worker.processes import fork_server
from worker.processes.fork_server import ForkServerClient, ForkServerLost


def client_of(monkeypatch: pytest.MonkeyPatch, folder: Path, answer: dict[str, Any]) -> Any:
    """A client without a process; the first wait for an answer ends late, just after it came."""
    client: Any = ForkServerClient(log_path=folder / "log")
    client._socket, client.other_end = socket.socketpair()
    client._ready.set()

    class Late(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            if timeout is not None:
                if answer:
                    client._on_message({"id": 1} | answer)
                raise TimeoutError
            return super().result(10)

    monkeypatch.setattr(fork_server, "Future", Late)
    return client


def close(client: Any) -> None:
    client._socket.close()
    client.other_end.close()


def test_a_rank_whose_answer_comes_at_the_deadline_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    client = client_of(monkeypatch, tmp_path, {"pid": os.getpid()})
    rank = client.fork(tmp_path, {})
    assert rank.identity.pid == os.getpid()
    assert client._ranks == {os.getpid(): rank}
    os.fstat(rank._lifeline)  # open: only the rank closes it
    rank.close()
    close(client)


def test_a_refusal_at_the_deadline_is_raised_and_the_lifeline_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    client = client_of(monkeypatch, tmp_path, {"error": "no memory"})
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ForkServerLost, match="could not fork: no memory"):
        client.fork(tmp_path, {})
    assert len(os.listdir("/proc/self/fd")) == before
    close(client)


def test_without_an_answer_the_fork_server_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    client = client_of(monkeypatch, tmp_path, {})
    with pytest.raises(ForkServerLost, match="did not answer"):
        client.fork(tmp_path, {})
    assert client._asked == {}
    close(client)
