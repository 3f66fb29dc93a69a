"""The log of a job: what its processes print, filtered by the service."""

from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from typing import Any

import httpx2

from glasshouse.client.aio.records import HELD_S
from glasshouse.client.aio.results import AsyncResults
from glasshouse.client.aio.running import sleep
from glasshouse.client.aio.stream import AsyncEventStream
from glasshouse.client.connection.requests import API, Request
from glasshouse.events import LogLevel

PAUSE_S = 0.2
"""Between two requests of a follower: a job that prints all the time fills more of each answer."""
Ranks = int | Sequence[int] | None
Since = str | datetime | None
_TEXT, _JSON = {"Accept": "text/plain"}, {"Accept": "application/json"}


def log_filters(
    rank: Ranks, level: LogLevel | None, grep: str | None, since: Since
) -> dict[str, Any]:
    """Return the query parameters of filters. A time without a zone is local."""
    ranks = rank if rank is None or isinstance(rank, int) else list(rank)
    at = since.astimezone().isoformat() if isinstance(since, datetime) else since
    return {"rank": ranks, "level": level, "grep": grep, "since": at}


class AsyncJobLog(AsyncResults):
    """What a job can do with its log."""

    async def logs(
        self,
        rank: Ranks = None,
        *,
        tail: int | None = None,
        grep: str | None = None,
        level: LogLevel | None = None,
        since: Since = None,
    ) -> str:
        """Return the log so far. Use `follow` for new lines.

        Args:
            rank: only lines of this rank, or of several. Default: all ranks.
            tail: only this many lines from the end, of those that the filters leave.
            grep: only lines that match this regular expression, in the syntax of RE2.
            level: only lines of this level and above: ``debug``, ``info``, ``warning``,
                ``error``. Lines that do not state a level are ``info``.
            since: only lines since this time: a datetime, an ISO 8601 text, or how long ago, such
                as ``"10m"`` or ``"2h30m"``.
        """
        params = log_filters(rank, level, grep, since)
        if tail is None:
            return "".join([page.text async for page in self._pages(params, _TEXT)])
        pages = await self._last_pages(params, _TEXT, tail)
        return "".join(page.text for page in pages)

    async def follow(
        self,
        rank: Ranks = None,
        *,
        grep: str | None = None,
        level: LogLevel | None = None,
        since: Since = None,
        tail: int | None = None,
    ) -> AsyncGenerator[str]:
        """Follow the log: yield the lines that the job prints until it ends.

        The arguments are those of `logs`; ``tail`` limits the lines that are printed already.
        """
        records = self.follow_records(rank, grep=grep, level=level, since=since, tail=tail)
        async for record in records:
            for line in record["lines"]:
                yield line

    async def follow_records(
        self,
        rank: Ranks = None,
        *,
        grep: str | None = None,
        level: LogLevel | None = None,
        since: Since = None,
        tail: int | None = None,
    ) -> AsyncGenerator[dict[str, Any]]:
        """Like `follow`, but yield ``log`` events, with ``rank``, ``lines`` and ``levels``."""
        if level is grep is since is tail is None:
            wanted = None if rank is None else {rank} if isinstance(rank, int) else {*rank}
            path = f"{API}{self.path}/stream"
            async with AsyncEventStream(self._transport, path, types=["log"]) as stream:
                async for record in stream.records():
                    if wanted is None or record["rank"] in wanted:
                        yield record
            return
        params = log_filters(rank, level, grep, since)
        if tail is not None:
            pages = await self._last_pages(params, _JSON, tail)
            params["after"] = pages[-1].headers["x-last-seq"]
            for page in pages:
                for record in self._transport.decode(page)["data"]:
                    yield record
        async for record in self._new_records(params):
            yield record

    async def _new_records(self, params: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Yield the records that match from a cursor on, until the job has ended."""
        is_over = False
        while True:
            num_records = 0
            async for page in self._pages(params, _JSON | {"Prefer": f"wait={HELD_S:.0f}"}):
                params = params | {"after": page.headers["x-last-seq"]}
                for record in self._transport.decode(page)["data"]:
                    num_records += 1
                    yield record
            if is_over:
                return
            if num_records:
                await sleep(PAUSE_S)
            else:  # the service has waited, or the job has ended
                await self.refresh()
                is_over = self.has_ended

    async def _pages(
        self, params: dict[str, Any], headers: dict[str, str]
    ) -> AsyncGenerator[httpx2.Response]:
        """Yield the responses with the lines after a cursor: a search may take several."""
        while True:
            page = await self._page(params, headers)
            yield page
            if "x-has-more" not in page.headers:
                return
            params = params | {"after": page.headers["x-last-seq"]}

    async def _last_pages(
        self, params: dict[str, Any], headers: dict[str, str], tail: int
    ) -> list[httpx2.Response]:
        """Return the responses with the last lines, in order."""
        pages: list[httpx2.Response] = []
        while True:
            pages.append(await self._page(params | {"tail": tail}, headers))
            tail -= self._num_lines(pages[-1])
            if tail <= 0 or "x-has-more" not in pages[-1].headers:
                return pages[::-1]
            params = params | {"before": pages[-1].headers["x-first-seq"]}

    def _num_lines(self, page: httpx2.Response) -> int:
        if page.headers["content-type"].startswith("text/plain"):
            return page.text.count("\n")
        return sum(len(record["lines"]) for record in self._transport.decode(page)["data"])

    async def _page(self, params: dict[str, Any], headers: dict[str, str]) -> httpx2.Response:
        timeout_s = self._transport.timeout_s + (HELD_S if "Prefer" in headers else 0)
        path = f"{API}{self.path}/logs"
        return await self._transport.send(
            Request("GET", path, params, headers, timeout_s=timeout_s)
        )
