"""Count a training step's memory besides the parameters, on a step without data.

The whole step runs on tensors that have a size and no memory (torch's fake CPU tensors, or the meta
device if a layer does not support them). Each storage counts from the operation that creates it
until nothing refers to it, which is what torch allocates. Of the internal buffers of routines only
an LSTM's workspace is counted, which the CPU's LSTM keeps until the backward pass.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.losses.losses import Losses, loss_of, without_lengths
from engine.network.network import Network
from engine.network.recurrent import Recurrent
from engine.optim.parameter_options import make_optimizer
from glasshouse.spec import Graph, TrainJob

_LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_UPDATED = 16
"""Number of parameters, the largest, whose update is counted: each is updated by itself."""
_META_STEPS = 16
"""Number of chunks of a recurrent layer's steps on the meta device, which has no LSTM."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors created in this context while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count its outputs."""
        for tensor in _tensors(args):
            self._see(tensor.untyped_storage(), is_new=False)  # from outside, and so are its views
        output = func(*args, **(kwargs or {}))
        for tensor in _tensors(output):
            self._see(tensor.untyped_storage(), is_new=True)
        if func is torch.ops.aten.mkldnn_rnn_layer.default and not output[3].numel():
            self._grow(output[3].untyped_storage(), _workspace(output[0]))
        return output

    def _see(self, storage: torch.UntypedStorage, *, is_new: bool) -> None:
        key = storage._cdata  # pyright: ignore[reportPrivateUsage]
        if key in self._sizes:
            return
        self._sizes[key] = 0
        self._grow(storage, storage.nbytes() if is_new else 0)
        weakref.finalize(storage, self._forget, key)

    def _grow(self, storage: torch.UntypedStorage, size: int) -> None:
        self._sizes[storage._cdata] += size  # pyright: ignore[reportPrivateUsage]
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def _workspace(output_TBH: Tensor) -> int:
    """Return the bytes that oneDNN keeps of an LSTM's layer until backward, by output size.

    Measured bytes per output: 60 to 66 for float32, 42 to 48 for bfloat16; more with fewer outputs.
    """
    return output_TBH.numel() * (62 if output_TBH.element_size() == 4 else 45)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.layout is torch.strided:
            yield output
    elif isinstance(output, (tuple, list)):
        for item in output:  # pyright: ignore[reportUnknownVariableType]
            yield from _tensors(item)


def step_peak(
    job: TrainJob, wanted: Sequence[str], make_batch: Callable[[], dict[str, Tensor]]
) -> int | None:
    """Return a step's peak bytes: its batch, activations, gradients, and temporary buffers.

    Parameters and optimizer state are excluded. None: a layer cannot run without data. Results are
    cached.
    """
    batch = make_batch()
    asked = [job.network, *job.losses, job.optimizer]
    shapes = [(name, x.shape, x.dtype) for name, x in batch.items()]
    texts = [item.model_dump_json() for item in asked]
    key = (*texts, job.precision, *job.activation_boundaries, *wanted, *shapes)
    return _known_peak(_Step(key, job, tuple(wanted), make_batch))


@dataclass(frozen=True)
class _Step:
    """A step to count; two with the same keys are the same."""

    key: tuple[Any, ...]
    job: TrainJob = field(compare=False)
    wanted: tuple[str, ...] = field(compare=False)
    make_batch: Callable[[], dict[str, Tensor]] = field(compare=False)


@lru_cache(maxsize=64)
def _known_peak(step: _Step) -> int | None:
    job, wanted, make_batch = step.job, step.wanted, step.make_batch
    with contextlib.suppress(Exception), FakeTensorMode(), torch.device("cpu"):
        return _counted(job, wanted, make_batch, "cpu")
    with contextlib.suppress(Exception), torch.device("meta"):
        plain = job.model_copy(update={"precision": "float32"})
        return _counted(plain, wanted, make_batch, "meta")
    return None


def _counted(
    job: TrainJob,
    wanted: Sequence[str],
    make_batch: Callable[[], dict[str, Tensor]],
    device: Literal["cpu", "meta"],
) -> int:
    network = Network(_without_lengths(job.network), wanted, kept_at=job.activation_boundaries)
    loss_fn = Losses.of(without_lengths(job))
    network.low_precision = _LOW.get(job.precision)
    network.train()
    for module in network.modules():
        if isinstance(module, Recurrent):
            module.meta_steps = _META_STEPS
    live = LiveBytes()
    with live:
        batch = {name: torch.empty_like(x, device=device) for name, x in make_batch().items()}
        values = network(batch)
        loss = loss_of(loss_fn, values).total
        del batch, values
        loss.backward()
        del loss
    return max(live.peak, live.now + _update_peak(job, network))


def _update_peak(job: TrainJob, network: nn.Module) -> int:
    """Return the optimizer's temporary bytes in an update; 0 if that needs real values."""
    if not job.optimizer.args.get("foreach"):
        learned = [item for item in network.parameters() if item.grad is not None]
        for item in sorted(learned, key=lambda one: one.nbytes)[:-_UPDATED]:
            item.grad = None
    with contextlib.suppress(Exception):
        optimizer = make_optimizer(job.optimizer, job.network, network)
        optimizer.step()  # creates its state
        with LiveBytes() as live:
            optimizer.step()
        return live.peak
    return 0


def _without_lengths(graph: Graph) -> Graph:
    """Return the graph with all rows as long as the longest, which needs the most memory."""
    layers = tuple(layer.model_copy(update={"lengths": None}) for layer in graph.layers)
    return graph.model_copy(update={"layers": layers})
