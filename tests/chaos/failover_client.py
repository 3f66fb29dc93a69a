"""A client of a service whose APIs die: it asks whichever lives, until one answers."""

import time
from collections.abc import Callable
from typing import Self, TypeVar

import glasshouse as gh
from tests.acceptance.services import Cluster

T = TypeVar("T")


class FailoverClient:
    """Asks the APIs of a cluster in turn. Of one thread; use it in a ``with`` block or close it."""

    def __init__(self, cluster: Cluster, patience_s: float) -> None:
        self._cluster = cluster
        self._patience_s = patience_s
        self._turn = 0
        self._clients: dict[str, gh.Client] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that it keeps."""
        for client in self._clients.values():
            client.close()

    def ask(self, act: Callable[[gh.Client], T]) -> T:
        """What ``act`` makes of a client; errors of the way are the monkey's, and tried again."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return act(self._next())
            except (gh.APIConnectionError, gh.ServiceUnavailableError):
                assert time.monotonic() < deadline, "no API has answered for too long"
                time.sleep(0.1)

    def _next(self) -> gh.Client:
        names = self._cluster.api_names
        self._turn += 1
        name = names[self._turn % len(names)]
        if name not in self._clients:
            self._clients[name] = self._cluster.endpoint(name).client()
        return self._clients[name]
