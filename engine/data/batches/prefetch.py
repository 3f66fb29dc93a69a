"""Batches made ahead of training, by threads. They end with their process, however it ends."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Key = TypeVar("Key")
Made = TypeVar("Made")


class Prefetcher(Generic[Made]):
    """Does tasks in order, and ahead of whoever takes what they give."""

    def __init__(self, workers: int = 0) -> None:
        """``workers`` threads; with none each task is done when what it gives is wanted."""
        self.workers = workers
        self._threads: ThreadPoolExecutor | None = None

    def each(self, tasks: Iterable[tuple[Key, Callable[[], Made]]]) -> Iterator[tuple[Key, Made]]:
        """Each key with what its task gave."""
        if not self.workers:
            for key, task in tasks:
                yield key, task()
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="data")
        waiting: deque[tuple[Key, Future[Made]]] = deque()
        for key, task in tasks:
            waiting.append((key, self._threads.submit(task)))
            if len(waiting) > self.workers:
                first, made = waiting.popleft()
                yield first, made.result()
                del made  # or it would stay until the next one is there
        while waiting:
            key, made = waiting.popleft()
            yield key, made.result()
            del made

    def close(self) -> None:
        """End the threads; what they have begun is finished, and the rest is not done."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
