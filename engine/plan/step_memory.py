"""What a training step needs in memory beside the parameters: counted on a step without data.

The whole step runs on tensors that have a size and no memory (torch's fake tensors of the CPU, or
its meta device where a layer does not know them), and each storage counts from the operation that
makes it to the moment when nobody holds it any more. That is what torch allocates. Of what routines
take for themselves only the workspace of an LSTM is in it, which the CPU's keeps to the backward.
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
"""Of so many parameters the update is counted, the largest: each is updated by itself."""
_META_STEPS = 16
"""In so many turns the steps of a recurrent layer run on the meta device, which knows no LSTM."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are made in here, as long as they live."""

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
        """Run an operation and take in what it made."""
        for tensor in _tensors(args):
            self._see(tensor.untyped_storage(), is_new=False)  # of outside, and so are its views
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
    """What oneDNN keeps of an LSTM's layer until the backward: so many bytes for each output.

    Measured: 60 to 66 of float32, 42 to 48 of bfloat16; the more, the fewer outputs.
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
    """The most bytes that a step holds at once: its batch, activations, gradients, and what comes.

    Parameters and what the optimizer keeps are not in it. None: a layer cannot run without data.
    What was counted before is known.
    """
    batch = make_batch()
    asked = [job.network, *job.losses, job.optimizer]
    shapes = [(name, x.shape, x.dtype) for name, x in batch.items()]
    texts = [item.model_dump_json() for item in asked]
    key = (*texts, job.precision, *job.activation_boundaries, *wanted, *shapes)
    return _known_peak(_Step(key, job, tuple(wanted), make_batch))


@dataclass(frozen=True)
class _Step:
    """A step to count; two are the same by their keys."""

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
    """What an optimizer holds for a moment while it updates; 0 where that needs real numbers."""
    if not job.optimizer.args.get("foreach"):
        learned = [item for item in network.parameters() if item.grad is not None]
        for item in sorted(learned, key=lambda one: one.nbytes)[:-_UPDATED]:
            item.grad = None
    with contextlib.suppress(Exception):
        optimizer = make_optimizer(job.optimizer, job.network, network)
        optimizer.step()  # makes what it keeps
        with LiveBytes() as live:
            optimizer.step()
        return live.peak
    return 0


def _without_lengths(graph: Graph) -> Graph:
    """The graph with every row as long as the longest, which needs most."""
    layers = tuple(layer.model_copy(update={"lengths": None}) for layer in graph.layers)
    return graph.model_copy(update={"layers": layers})
