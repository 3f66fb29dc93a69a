"""Things the service keeps, as the client sees them: every field stays, also unknown ones."""

import json
import time
from collections.abc import AsyncGenerator
from typing import Any, Self

from glasshouse import jsonio
from glasshouse.client.aio.running import in_thread, sleep
from glasshouse.client.aio.transport import AsyncTransport
from glasshouse.client.requests import API, Request, id_in_path
from glasshouse.client.tensors import Array, read_tensors
from glasshouse.client.weights import as_state_dict, in_module, load_into
from glasshouse.errors import APIError, UnprocessableEntityError, WaitTimeout

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5
HELD_S = 20.0
"""How long the service is asked to hold an answer until something changes."""


class AsyncRecord:
    """One thing the service keeps. Fields are attributes; ``data`` is the whole document."""

    _PATH = ""

    def __init__(self, transport: AsyncTransport, data: dict[str, Any]) -> None:
        self._transport = transport
        self._etag: str | None = None
        self.data = data

    object: str
    """What it is: ``job``, ``dataset`` …"""

    @property
    def id(self) -> str:
        """Its id."""
        return self.data["id"]

    @property
    def path(self) -> str:
        """Where it lives, under ``/api/v1``."""
        return f"{self._PATH}/{id_in_path(self.id, self._PATH.strip('/').removesuffix('s'))}"

    def to_json(self) -> str:
        """The whole document as JSON, as the service gave it."""
        return jsonio.dumps(self.data)

    def __getattr__(self, name: str) -> Any:
        data = self.__dict__.get("data", {})
        if name in data:
            return data[name]
        raise AttributeError(f"{type(self).__name__} has no attribute or field {name!r}")

    def __repr__(self) -> str:
        shown = (f"{key}={self.data[key]!r}" for key in ("id", "name", "state") if key in self.data)
        return f"{type(self).__name__}({', '.join(shown)})"

    async def _fetch(self, *, wait_s: float = 0.0) -> bool:
        """Read it anew, held back until it changes or the wait is over; whether it changed."""
        headers: dict[str, str] = {}
        if wait_s >= 1 and self._etag:
            headers = {"If-None-Match": self._etag, "Prefer": f"wait={int(wait_s)}"}
        timeout_s = wait_s + self._transport.timeout_s
        request = Request("GET", API + self.path, headers=headers, timeout_s=timeout_s)
        response = await self._transport.send(request)
        if response.status_code == 304:
            return False
        self._etag = response.headers.get("etag")
        self.data = self._transport.decode(response)
        return True

    async def _changes(self, timeout: float | None, goal: str) -> AsyncGenerator[None]:
        """Yield once for each look at it, until the caller stops asking.

        Raises:
            WaitTimeout: the time is up.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        pause_s = FIRST_PAUSE_S
        await self._fetch()
        while True:
            yield
            left_s = HELD_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                raise WaitTimeout(f"{self.id} did not {goal} within {timeout:g} s; it goes on")
            # a running job changes all the time: the pause bounds how often it is asked
            await sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
            await self._fetch(wait_s=min(left_s, HELD_S))


class AsyncDataset(AsyncRecord):
    """A dataset: rows of named columns, in splits."""

    _PATH = "/datasets"

    name: str
    format: str
    problem: dict[str, Any] | None
    """Why it could not be read."""
    size_bytes: int
    sha256: str | None
    """Of the file that was sent."""
    resize: str | None
    header: bool | None
    """Of csv and tsv: whether the first row names the columns, if the upload said so."""
    notes: list[dict[str, str]]
    """Guesses of the reader that you may want to correct: ``code`` and ``detail`` of each."""
    created_at: str
    links: dict[str, str]

    @property
    def state(self) -> str:
        """``pending``, ``ready`` or ``failed``."""
        return self.data["state"]

    @property
    def columns(self) -> list[dict[str, Any]]:
        """Name, dtype and shape of one row's value, for each column."""
        return self.data["columns"]

    @property
    def splits(self) -> dict[str, int]:
        """The rows of each split."""
        return self.data["splits"]

    async def refresh(self) -> Self:
        """Read it anew."""
        await self._fetch()
        return self

    async def wait(self, timeout: float | None = None) -> "AsyncDataset":
        """Wait until it is ready to be used.

        Raises:
            UnprocessableEntityError: the file could not be read; its problem says why.
            WaitTimeout: it is not ready in time.
        """
        async for _ in self._changes(timeout, "become ready"):
            if self.state == "failed":
                problem = self.data.get("problem") or {"detail": "the file could not be read"}
                detail = f"{self.id}: {problem.get('detail')}"
                raise UnprocessableEntityError(detail, status_code=422, problem=problem)
            if self.state == "ready":
                break
        return self

    async def rows(
        self,
        split: str | None = None,
        offset: int = 0,
        limit: int | None = None,
        *,
        values: int | None = None,
    ) -> list[dict[str, Any]]:
        """Some rows, each as a dict by column; ``values``: so many of a row, else 1,000."""
        params = {"split": split, "offset": offset, "limit": limit, "values": values}
        return (await self._transport.get(f"{self.path}/rows", params))["data"]

    async def stats(self) -> dict[str, Any]:
        """Figures of each column."""
        return await self._transport.get(f"{self.path}/stats")

    async def delete(self) -> None:
        """Delete it and its files; refused while a job uses it."""
        await self._transport.delete(self.path)


class AsyncCheckpoint(AsyncRecord):
    """A saved state of training."""

    _PATH = "/checkpoints"

    name: str | None
    job: str | None
    """None: weights that were sent."""
    attempt: int | None
    step: int
    """The step that would come next."""
    epoch: int
    final: bool
    """Whether it is of the end of the training."""
    best: bool
    """Whether it is the best of its job's that are there, by the metric of ``keep_best``."""
    reason: str | None
    """Why it is the best: ``lowest validation/loss``."""
    state: str
    size_bytes: int
    files: dict[str, Any]
    metrics: dict[str, Any]
    """What was known by then; numbers that are not finite by their names."""
    created_at: str
    links: dict[str, str]

    async def weights(self) -> dict[str, Array]:
        """The network's weights, by torch's parameter names."""
        return read_tensors(await self.read_weights())

    async def network(self) -> dict[str, Any]:
        """What its weights are of: ``network``, a graph, and ``fields``, what that reads."""
        return await self._transport.get(f"{self.path}/network")

    async def state_dict(self) -> dict[str, Any]:
        """The weights as torch tensors, by the names of the module that the network was made from.

        Of a network that was written as a graph: by the graph's names.
        """
        named = await self._named()
        return await in_thread(lambda: as_state_dict(named))

    async def load_into(self, module: Any) -> None:
        """Put the weights back into a torch module like the one that was trained.

        Raises:
            ValueError: it is another module.
        """
        named = await self._named()
        await in_thread(lambda: load_into(module, named))

    async def _named(self) -> dict[str, Array]:
        graph = (await self.network())["network"]
        return in_module(graph, await self.weights())

    async def read_weights(self) -> bytes:
        """The weights as the bytes of a safetensors file."""
        return await self._transport.download(f"{self.path}/weights")

    async def learned(self) -> dict[str, Array]:
        """What was learned of the training rows before the first step.

        Figures to normalise and to fill by (``<field>.shift``, ``.divisor``, ``.fill``), and
        vocabularies (``<field>.tokens``, see `vocabulary`).

        Raises:
            NotFoundError: nothing was.
        """
        return read_tensors(await self._transport.download(f"{self.path}/data"))

    async def vocabulary(self, field: str | None = None) -> list[str]:
        """The tokens of a field of texts, each at the place that is its id.

        The first two stand for what has none: ``<padding>`` and ``<unknown>``.

        Args:
            field: its name; left out, the only one that has a vocabulary, or the windows.

        Raises:
            APIError: there is no such field, or it is not clear which is meant.
        """
        suffix = ".tokens"
        learned = await self.learned()
        found = {
            name.removesuffix(suffix): packed
            for name, packed in learned.items()
            if name.endswith(suffix)
        }
        if field is None and len(found) == 1:
            (field,) = found
        if field is None or field not in found:
            listed = ", ".join(sorted(found)) or "none"
            raise APIError(f"{self.id} has vocabularies of: {listed}; name one of them")
        return ["<padding>", "<unknown>", *json.loads(found[field].tobytes())]

    async def delete(self) -> None:
        """Delete it and its files; refused while a job uses it."""
        await self._transport.delete(self.path)
