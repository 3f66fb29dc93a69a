"""The learner: the network with its losses, optimizer, schedule, averages and tuning."""

import contextlib
from collections.abc import Callable, Generator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from engine.core.precision import chosen
from engine.core.timing import Clock
from engine.data.batches.batch import Batch
from engine.distributed.data_parallel import data_parallel, seed_step, unreached
from engine.distributed.group import ALONE, Group
from engine.learner.averaging import Averages, averages
from engine.learner.side_effects import untouched
from engine.learner.tuning import Tuned
from engine.losses.losses import Losses, loss_of
from engine.metrics.metrics import wanted
from engine.network.hidden_state import HiddenState, alone
from engine.network.network import Network
from engine.optim.gradient_clipping import Clip, clipping
from engine.optim.gradient_scaling import GradScaling
from engine.optim.lr_schedulers import LearningRate, learning_rate
from engine.optim.parameter_options import fill, make_optimizer
from glasshouse.spec import TrainJob


class Learner(NamedTuple):
    """The network and everything it is trained with."""

    network: Network
    loss_fn: Losses
    optimizer: torch.optim.Optimizer
    clip: Clip | None = None
    rate: LearningRate | None = None
    averages: Averages | None = None
    tuned: Tuned | None = None
    hidden_state: HiddenState | None = None
    scaling: GradScaling | None = None
    group: Group = ALONE
    """The processes that train the network together."""
    parallel: DistributedDataParallel | None = None
    """The network, wrapped so that a backward pass sums the gradients over the processes."""

    def shared(self, group: Group, batch: Callable[[], Batch]) -> "Learner":
        """Return the learner of one process of a group; ``batch``: makes some rows to try."""
        if group.is_alone:
            return self

        def once(network: nn.Module) -> None:
            loss_of(self.loss_fn, network(batch().tensors)).total.backward()

        device = next(self.network.parameters()).device
        with untouched(self.network, device):
            unused = unreached(self.network, lambda: once(self.network))
        wrapped = data_parallel(self.network, unused)
        with untouched(self.network, device):
            # After its first pass, torch arranges the gradients anew, and with it the order of the
            # sums: do that before training, so that a resumed job has the same order.
            once(wrapped)
        return self._replace(group=group, parallel=wrapped)

    def seed(self, seed: int, step: int) -> None:
        """Seed the random generators for a step, if there are several processes."""
        if not self.group.is_alone:
            seed_step(seed, step, self.group)

    def forward(self, batch: Batch, *, is_last: bool) -> dict[str, Tensor]:
        """Run the forward pass of a batch; ``is_last``: the last of its step."""
        if self.parallel is None:
            return self.network(batch.tensors)
        with contextlib.nullcontext() if is_last else self.parallel.no_sync():
            found: dict[str, Tensor] = self.parallel(batch.tensors)
        return found

    @property
    def update(self) -> Callable[[], object]:
        """Return what makes an update from the present gradients, or skips it."""
        return self.optimizer.step if self.scaling is None else self.scaling.step

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Run the backward pass of a batch; ``is_last``: the last of its step."""
        if self.scaling is None:
            loss.backward()
        else:
            self.scaling.backward(loss, is_last=is_last)

    def follow(
        self,
        step: int,
        num_rows: int,
        *,
        ends_epoch: bool,
        has_skipped: Callable[[], bool],
        clock: Clock,
    ) -> None:
        """After a step of ``num_rows`` rows, advance averages and schedules.

        ``has_skipped``: whether the step made no update because gradients overflowed or the guard
        skipped it. Averages and schedules then do not advance; only a schedule of epochs still
        counts the end of one. It is called only if there are averages or a schedule.
        """
        if self.hidden_state is not None and ends_epoch:
            self.hidden_state.reset()
        if self.averages is not None or self.rate is not None:
            num_updates = 0 if has_skipped() else 1
            if self.averages is not None and num_updates:
                self.averages.update(step)
            if self.rate is not None:
                self.rate.count(num_rows, ends_epoch=ends_epoch, num_updates=num_updates)
        clock.mark("optimizer")

    @contextlib.contextmanager
    def judged(self) -> Generator[None]:
        """Make the network the one that evaluations use, in this context."""
        averages = contextlib.nullcontext() if self.averages is None else self.averages.applied()
        with averages, alone(self.hidden_state):
            self.group.broadcast_tensors(self.network.buffers())
            yield


def learner_of(job: TrainJob, device: torch.device) -> Learner:
    """Create the learner of a job on a device."""
    network = Network(job.network, wanted(job), kept_at=job.activation_boundaries).to(device)
    loss_fn = Losses.of(job).to(device)
    network.low_precision = chosen(job.precision, device)
    fill(job.network, network)
    tuned = Tuned(job.memory_format, network)  # before the optimizer has state
    optimizer = make_optimizer(job.optimizer, job.network, network)
    clip = clipping(job.grad_clip, job.network, network)
    rate = learning_rate(job.scheduler, optimizer)
    scaling = (
        GradScaling(job.grad_scaler, optimizer, device)
        if network.low_precision == torch.float16
        else None
    )
    network.output_clips.scaling = scaling
    return Learner(
        network,
        loss_fn,
        optimizer,
        clip,
        rate,
        averages(job.average, network),
        tuned if job.tune else None,
        HiddenState.of(job.network, network),
        scaling,
    )
