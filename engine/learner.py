"""What is being trained, and with what: the network, its losses, its optimizer, what goes along."""

import contextlib
from collections.abc import Callable, Generator
from typing import NamedTuple

import torch
from torch import Tensor

from engine.averaging import Averages, averages
from engine.carried import Carried, alone
from engine.clipping import Clip, clipping
from engine.layer_options import fill, make_optimizer
from engine.learning_rate import LearningRate, learning_rate
from engine.losses import Losses
from engine.metrics import wanted
from engine.network import Network
from engine.precision import chosen
from engine.scaling import Scaling
from engine.timing import Clock
from engine.tuning import Tuned
from glasshouse.spec import TrainJob


class Learner(NamedTuple):
    """What is being trained, and with what."""

    network: Network
    loss_fn: Losses
    optimizer: torch.optim.Optimizer
    clip: Clip | None = None
    rate: LearningRate | None = None
    averages: Averages | None = None
    tuned: Tuned | None = None
    carried: Carried | None = None
    scaling: Scaling | None = None

    @property
    def update(self) -> Callable[[], object]:
        """What makes an update of the gradients that are there, or decides not to."""
        return self.optimizer.step if self.scaling is None else self.scaling.step

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """The backward pass of a batch, the last of its step or not."""
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
        """After a step with so many rows: what advances with the updates.

        ``has_skipped``: whether the step made no update, as it does where gradients overflowed or
        the guard withheld it. Averages and schedules then stay where they are; only a schedule of
        epochs still counts the end of one. Asked only where there is either.
        """
        if self.carried is not None and ends_epoch:
            self.carried.reset()
        if self.averages is not None or self.rate is not None:
            num_updates = 0 if has_skipped() else 1
            if self.averages is not None and num_updates:
                self.averages.update(step)
            if self.rate is not None:
                self.rate.count(num_rows, ends_epoch=ends_epoch, num_updates=num_updates)
        clock.mark("optimizer")

    @contextlib.contextmanager
    def judged(self) -> Generator[None]:
        """The network in here is the one that evaluations judge."""
        averages = contextlib.nullcontext() if self.averages is None else self.averages.applied()
        with averages, alone(self.carried):
            yield


def learner_of(job: TrainJob, device: torch.device) -> Learner:
    """All of it as a job has it, on a device."""
    network = Network(job.network, wanted(job), kept_at=job.activation_boundaries).to(device)
    loss_fn = Losses.of(job).to(device)
    network.low_precision = chosen(job.precision, device)
    fill(job.network, network)
    tuned = Tuned(job.memory_format, network)  # before there is state of the optimizer
    optimizer = make_optimizer(job.optimizer, job.network, network)
    clip = clipping(job.grad_clip, job.network, network)
    rate = learning_rate(job.scheduler, optimizer)
    scaling = (
        Scaling(job.grad_scaler, optimizer, device)
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
        Carried.of(job.network, network),
        scaling,
    )
