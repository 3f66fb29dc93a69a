"""Drives the asynchronous client as if it were blocking, so that one test covers both.

Each coroutine runs to its end on the test's event loop, and each asynchronous generator is iterated
by hand. Results are wrapped again. Nothing of the client is replaced.
"""

import asyncio
import inspect
from collections.abc import Generator
from typing import Any

import glasshouse as gh
from glasshouse.client import aio

_HOME = aio.__name__


class Blocking:
    """Wraps an object of the asynchronous client."""

    def __init__(self, inner: Any, loop: asyncio.AbstractEventLoop) -> None:
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "loop", loop)

    @property
    def __class__(self) -> Any:
        """The blocking counterpart, for `isinstance` in tests."""
        return getattr(gh, type(self.inner).__name__.removeprefix("Async"), Blocking)

    def __getattr__(self, name: str) -> Any:
        return self._shown(getattr(self.inner, name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_sleep":  # a test's replacement blocks, or only records

            async def sleep(seconds: float) -> None:
                value(seconds)

            setattr(self.inner, name, sleep)
        else:
            setattr(self.inner, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._shown(self.inner[key])

    def __iter__(self) -> Any:
        return self._walked(self.inner.__aiter__())

    def __enter__(self) -> Any:
        return self._run(self.inner.__aenter__())

    def __exit__(self, *raised: Any) -> Any:
        return self._run(self.inner.__aexit__(*raised))

    def __repr__(self) -> str:
        return repr(self.inner).replace("Async", "")

    def _run(self, awaitable: Any) -> Any:
        return self._shown(self.loop.run_until_complete(awaitable))

    def _walked(self, generator: Any) -> Generator[Any]:
        try:
            while True:
                try:
                    yield self._run(anext(generator))
                except StopAsyncIteration:
                    return
        finally:
            self.loop.run_until_complete(generator.aclose())

    def _shown(self, value: Any) -> Any:
        if inspect.ismethod(value) and type(value.__self__).__module__.startswith(_HOME):
            return lambda *given, **named: self._called(value, given, named)
        if inspect.isasyncgen(value):
            return self._walked(value)
        if isinstance(value, list):
            return [self._shown(item) for item in value]
        return Blocking(value, self.loop) if type(value).__module__.startswith(_HOME) else value

    def _called(self, method: Any, given: Any, named: Any) -> Any:
        found = method(
            *map(_inner, given), **{name: _inner(value) for name, value in named.items()}
        )
        return self._run(found) if inspect.isawaitable(found) else self._shown(found)


def _inner(value: Any) -> Any:
    if isinstance(value, list):
        return [_inner(item) for item in value]
    if isinstance(value, dict):
        return {name: _inner(item) for name, item in value.items()}
    return value.inner if type(value) is Blocking else value


def blocking_client(loop: asyncio.AbstractEventLoop, *given: Any, **options: Any) -> Any:
    """Return an `AsyncClient` that a test uses like a `Client`."""
    return Blocking(gh.AsyncClient(*given, **options), loop)
