"""Predictions with the current weights of a network that is being trained.

Training answers the requests that wait, between two steps. A second network computes them, with a
copy of the weights, in evaluation mode and with the settings of a serve job. So the answers are
those of the checkpoint of the same step, and training continues bit for bit as without them.
"""

import contextlib
import secrets
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.core import device as devices
from engine.core.device import is_accelerator
from engine.core.snapshot import State, Stateful
from engine.core.spool import now
from engine.core.timing import PREDICT, Clock, taken_out
from engine.data.columns.prepared import Prepared
from engine.learner.side_effects import Randomness
from engine.network.network import Network
from engine.serving.answers import answered, failed, refusal
from engine.serving.listener import Listener
from engine.serving.model_inputs import ModelInputs
from engine.serving.queue import Pending, RequestQueue
from engine.serving.served_models import ServedNetwork
from engine.training.report import Outputs
from glasshouse.spec import TrainJob

MAX_SHARE = 0.1
"""The most of a job's time that predictions take, beyond `MAX_CREDIT_S` and the newest batch."""
MAX_CREDIT_S = 0.5
"""The most time, saved up while no request came, that predictions may take at once."""
MAX_ROWS = 4096
"""The most rows of one request."""
MAX_BATCH_ROWS = 64
"""The most rows that are computed at once."""
MAX_QUEUE = 256
"""The most requests that wait."""
DRAIN_S = 2.0
"""The longest that requests in the queue are answered after training has ended."""


class LiveNetwork(ServedNetwork):
    """The second network, with the weights of one step."""

    def __init__(
        self, job_id: str, inputs: ModelInputs, device: torch.device, weights: State, step: int
    ) -> None:
        """``weights``: as a checkpoint has them. ``step``: the updates that they had."""
        super().__init__(inputs, device, MAX_BATCH_ROWS, partial(_load, weights))
        self._job_id, self.step = job_id, step

    @property
    def origin(self) -> dict[str, str | int]:
        """The job and the step."""
        return {"job": self._job_id, "step": self.step}

    def take(self, weights: State, step: int) -> None:
        """Copy the weights of another step."""
        _load(weights, self.network)
        self.step = step

    # what answers requests for the job, as an entry of the listener

    @property
    def current(self) -> ServedNetwork:
        """The network itself."""
        return self

    def choose(self) -> ServedNetwork:
        """Return the network itself."""
        return self

    def choose_shadow(self) -> None:
        """Return None: no other network computes the request."""


class LivePredictions:
    """Answers requests for predictions between the steps of a training job."""

    def __init__(self, job: TrainJob, device: torch.device, out: Outputs) -> None:
        """``device``: what trains the network, and computes predictions."""
        self._job, self._device, self._out = job, device, out
        self._requests = RequestQueue(MAX_QUEUE, MAX_BATCH_ROWS, 0.0)
        self._weights: Stateful | None = None
        self._prepared = Prepared()
        self._clock: Clock | None = None
        self._network: LiveNetwork | None = None
        self._listener: Listener | None = None
        self._num_turns = 0
        self._is_refused = False
        """Whether there is no second network, which was reported."""
        self._credit_s, self._turned_at = MAX_CREDIT_S, time.monotonic()

    def use(self, weights: Stateful, prepared: Prepared | None, clock: Clock) -> None:
        """Set where the weights are, and what training learned from its rows.

        Args:
            weights: the weights that a checkpoint is saved for.
            prepared: statistics and vocabularies; None: there are none.
            clock: measures the step.
        """
        self._weights, self._prepared, self._clock = weights, prepared or Prepared(), clock

    def turn(self, asked: Mapping[str, Any], step: int, *, is_last: bool = False) -> None:
        """Answer requests, for as long as they may take now. Listens first, if it does not yet.

        Args:
            asked: the ``job`` and ``at``, where to listen: see `Listener.open`.
            step: the updates that the weights had.
            is_last: no other turn follows.
        """
        self._num_turns += 1
        if self._network is None:
            if self._is_refused or is_last or not self._knows_memory:
                return
            with self._measured():
                self._open(asked, step)
        saved_s = MAX_SHARE * (time.monotonic() - self._turned_at)
        self._credit_s = min(MAX_CREDIT_S, self._credit_s + saved_s)
        if is_last:
            self._credit_s = DRAIN_S
        if len(self._requests) and self._credit_s > 0:
            with self._measured():
                self._answer_some(step)
        self._turned_at = time.monotonic()

    def close(self) -> None:
        """Take no more requests, and refuse those that wait."""
        if self._listener is None:
            return
        self._listener.close()
        answer = refusal(503, "replica_closing", "The job takes no more requests.")
        while waiting := self._requests.take(0.0):
            self._listener.send([partial(request.answer, *answer) for request in waiting])
        self._listener.stop()
        self._listener = None

    @property
    def _knows_memory(self) -> bool:
        """Whether it is known how much memory a step takes."""
        return self._num_turns > 1 or not is_accelerator(self._device)

    @contextlib.contextmanager
    def _measured(self) -> Generator[None]:
        """Attribute the time of this context to predictions, and let training notice nothing."""
        measured = contextlib.nullcontext()
        if self._clock is not None:
            measured = taken_out(self._clock, PREDICT)
        with measured, _as_served(self._device):
            yield

    def _open(self, asked: Mapping[str, Any], step: int) -> None:
        """Create the second network, listen, and report the address; or why that is impossible."""
        record: dict[str, Any] = {"type": "answering", "at": now(), "address": "", "token": ""}
        try:
            weights = self._state()
            _check_memory(self._device, weights)
            inputs = ModelInputs.of(self._job, self._prepared)
            job_id = str(asked["job"])
            network = LiveNetwork(job_id, inputs, self._device, weights, step)
            token = secrets.token_urlsafe(32)
            listener = Listener(token, self._requests, MAX_ROWS)
            listener.entries = {job_id: network}
            record |= {"address": listener.open(asked["at"]), "token": token}
            self._network, self._listener = network, listener
        except Exception as error:  # training continues without
            traceback.print_exc()
            self._is_refused = True
            record["problem"] = f"{type(error).__name__}: {error}"[:500]
        self._out.emit(record)
        self._out.flush()

    def _state(self) -> State:
        assert self._weights is not None  # noqa: S101 (`use` comes first)
        return self._weights.state()

    def _answer_some(self, step: int) -> None:
        network = self._network
        assert network is not None  # noqa: S101 (the caller looked)
        devices.synchronize(self._device)  # the step itself is no prediction
        began = time.monotonic()
        if network.step != step:
            network.take(self._state(), step)
        with torch.inference_mode():
            while self._credit_s > time.monotonic() - began:
                batch = self._requests.take(0.0)
                if not batch:
                    break
                self._answer(network, batch)
        self._credit_s -= time.monotonic() - began

    def _answer(self, network: LiveNetwork, batch: list[Pending]) -> None:
        started = time.monotonic()
        answers: list[Callable[[], None]] = []
        try:
            found = network.compute([request.asked for request in batch])
            compute_s = time.monotonic() - started
            for request, columns in zip(batch, found, strict=True):
                answers.append(answered(request, columns, started - request.arrived, compute_s))
        except Exception as error:  # only the request that cannot be computed fails
            if len(batch) > 1:
                for request in batch:
                    self._answer(network, [request])
                return
            answers = [failed(batch[0], error)]
        if self._listener is not None:
            self._listener.send(answers)
        self._requests.took(batch, time.monotonic() - started)


def _load(weights: State, network: Network) -> None:
    """Copy weights into a network, as `load_model` does from the file of a checkpoint."""
    network.load_state_dict({name: weights[name] for name in network.state_dict()})


@contextlib.contextmanager
def _as_served(device: torch.device) -> Generator[None]:
    """Use the settings of a serve job in this context, and restore those of training after it.

    Layers that draw random numbers, also in evaluation mode, leave the generators as they were.
    """
    randomness = Randomness.now(device)
    precision = torch.get_float32_matmul_precision()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    if precision != "highest":
        torch.set_float32_matmul_precision("highest")
    if is_deterministic:
        torch.use_deterministic_algorithms(mode=False)
    try:
        yield
    finally:
        if is_deterministic:
            torch.use_deterministic_algorithms(mode=True)
        if precision != "highest":
            torch.set_float32_matmul_precision(precision)
        randomness.restore()


def _check_memory(device: torch.device, weights: State) -> None:
    """Refuse to take memory of an accelerator that a step of training may need.

    Raises:
        MemoryError: a second copy of the weights does not fit beside the largest step so far.
    """
    if not is_accelerator(device):
        return
    free = devices.free_bytes(device)
    if free is None:
        return
    needed = 2 * sum(item.nbytes for item in weights.values() if isinstance(item, Tensor))
    reserved = torch.accelerator.memory_reserved(device)
    left = free + reserved - torch.accelerator.max_memory_allocated(device)
    if needed > left:
        detail = f"a copy of the weights needs {needed >> 20} MiB of the device, and a step leaves"
        raise MemoryError(f"{detail} {max(0, left) >> 20} MiB")
