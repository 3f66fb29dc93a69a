"""Create batches ahead of training, in threads, which end with their process."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Key = TypeVar("Key")
Made = TypeVar("Made")


class Prefetcher(Generic[Made]):
    """Runs tasks in order, ahead of the consumer of their results."""

    def __init__(self, workers: int = 0) -> None:
        """``workers``: number of threads; with 0 each task runs when its result is needed."""
        self.workers = workers
        self._threads: ThreadPoolExecutor | None = None

    def each(self, tasks: Iterable[tuple[Key, Callable[[], Made]]]) -> Iterator[tuple[Key, Made]]:
        """Yield each key with the result of its task."""
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
                del made  # free it before the next one is ready
        while waiting:
            key, made = waiting.popleft()
            yield key, made.result()
            del made

    def close(self) -> None:
        """End the threads. Running tasks complete; the others are cancelled."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
