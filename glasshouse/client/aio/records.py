"""Resources of the service as client objects. Unknown fields are kept."""

import json
import time
from collections.abc import AsyncGenerator
from typing import Any, Self

from glasshouse import jsonio
from glasshouse.client.aio.running import in_thread, sleep
from glasshouse.client.aio.transport import AsyncTransport
from glasshouse.client.connection.requests import API, Request, id_in_path
from glasshouse.client.data.tensors import Array, read_tensors
from glasshouse.client.data.weights import as_state_dict, in_module, load_into
from glasshouse.errors import APIError, UnprocessableEntityError, WaitTimeout

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5
HELD_S = 20.0
"""How long a poll asks the service to hold the response until something changes (long polling)."""


class AsyncRecord:
    """One resource of the service. Fields are attributes; ``data`` is the complete document."""

    _PATH = ""

    def __init__(self, transport: AsyncTransport, data: dict[str, Any]) -> None:
        self._transport = transport
        self._etag: str | None = None
        self.data = data

    object: str
    """The type of the resource: ``job``, ``dataset`` …"""

    @property
    def id(self) -> str:
        """The id of the resource."""
        return self.data["id"]

    @property
    def path(self) -> str:
        """The path of the resource under ``/api/v1``."""
        return f"{self._PATH}/{id_in_path(self.id, self._PATH.strip('/').removesuffix('s'))}"

    def to_json(self) -> str:
        """Return the complete document as JSON."""
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
        """Fetch the resource, with long polling if ``wait_s`` >= 1; return whether it changed."""
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
        """Poll the resource: yield after each fetch until the caller stops iterating.

        Raises:
            WaitTimeout: ``timeout`` seconds have passed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        pause_s = FIRST_PAUSE_S
        await self._fetch()
        while True:
            yield
            left_s = HELD_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                raise WaitTimeout(
                    f"{self.id} did not {goal} within {timeout:g} s; it was not canceled"
                )
            # a running job changes all the time: the pause limits the request rate
            await sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
            await self._fetch(wait_s=min(left_s, HELD_S))


class AsyncDataset(AsyncRecord):
    """A dataset: rows of named columns, in splits."""

    _PATH = "/datasets"

    name: str
    format: str
    problem: dict[str, Any] | None
    """Why the file could not be read, as a problem document."""
    size_bytes: int
    sha256: str | None
    """The SHA-256 of the uploaded file."""
    resize: str | None
    header: bool | None
    """For csv and tsv: whether the first row has the column names, if the upload specified it."""
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
        """The name, dtype and shape (of one row) of each column."""
        return self.data["columns"]

    @property
    def splits(self) -> dict[str, int]:
        """The number of rows of each split."""
        return self.data["splits"]

    async def refresh(self) -> Self:
        """Fetch the current state of the dataset."""
        await self._fetch()
        return self

    async def wait(self, timeout: float | None = None) -> "AsyncDataset":
        """Wait until the dataset is ready to use.

        Args:
            timeout: seconds to wait. Default: no limit.

        Raises:
            UnprocessableEntityError: the file could not be read. The problem has the reason.
            WaitTimeout: the dataset was not ready in time.
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
        """Return rows, each as a dict by column.

        Args:
            split: the split to read from.
            offset: the first row, counted from 0.
            limit: the maximum number of rows.
            values: the maximum number of values per row. Default: 1,000.
        """
        params = {"split": split, "offset": offset, "limit": limit, "values": values}
        return (await self._transport.get(f"{self.path}/rows", params))["data"]

    async def stats(self) -> dict[str, Any]:
        """Return statistics of each column."""
        return await self._transport.get(f"{self.path}/stats")

    async def delete(self) -> None:
        """Delete the dataset and its files.

        Raises:
            ConflictError: a job uses it.
        """
        await self._transport.delete(self.path)


class AsyncCheckpoint(AsyncRecord):
    """A saved state of training."""

    _PATH = "/checkpoints"

    name: str | None
    job: str | None
    """The id of the job. None for uploaded weights."""
    attempt: int | None
    step: int
    """The next step to run."""
    epoch: int
    final: bool
    """Whether it was saved at the end of the training."""
    best: bool
    """Whether it is the best existing checkpoint of its job, by the metric of ``keep_best``."""
    reason: str | None
    """Why it is the best: ``lowest validation/loss``."""
    state: str
    size_bytes: int
    files: dict[str, Any]
    metrics: dict[str, Any]
    """The metrics at the time of saving. NaN and Inf are strings, as in JSON."""
    created_at: str
    links: dict[str, str]

    async def weights(self) -> dict[str, Array]:
        """Return the weights, by torch parameter name."""
        return read_tensors(await self.read_weights())

    async def network(self) -> dict[str, Any]:
        """Return the ``network`` of the weights as a graph, and the data ``fields`` it reads."""
        return await self._transport.get(f"{self.path}/network")

    async def state_dict(self) -> dict[str, Any]:
        """Return the weights as torch tensors, by the parameter names of the original module.

        If the network was not created from a module, the names are those of the graph.
        """
        named = await self._named()
        return await in_thread(lambda: as_state_dict(named))

    async def load_into(self, module: Any) -> None:
        """Load the weights into a torch module with the architecture that was trained.

        Raises:
            ValueError: the module lacks a parameter or has another shape.
        """
        named = await self._named()
        await in_thread(lambda: load_into(module, named))

    async def _named(self) -> dict[str, Array]:
        graph = (await self.network())["network"]
        return in_module(graph, await self.weights())

    async def read_weights(self) -> bytes:
        """Return the weights as the bytes of a safetensors file."""
        return await self._transport.download(f"{self.path}/weights")

    async def learned(self) -> dict[str, Array]:
        """Return what was computed from the training data before the first step.

        These are the statistics for normalizing and for filling missing values
        (``<field>.shift``, ``.divisor``, ``.fill``) and the vocabularies (``<field>.tokens``, see
        `vocabulary`).

        Raises:
            NotFoundError: nothing was computed.
        """
        return read_tensors(await self._transport.download(f"{self.path}/data"))

    async def vocabulary(self, field: str | None = None) -> list[str]:
        """Return the tokens of a text field. The index of a token is its id.

        The first two are the special tokens ``<padding>`` and ``<unknown>``.

        Args:
            field: the name of the field. Default: the only one that has a vocabulary.

        Raises:
            APIError: the field has no vocabulary, or several have one and ``field`` is unset.
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
        """Delete the checkpoint and its files.

        Raises:
            ConflictError: a job uses it.
        """
        await self._transport.delete(self.path)
