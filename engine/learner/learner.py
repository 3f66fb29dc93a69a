"""The learner: the network with its losses, optimizer, schedule, averages and tuning."""

import contextlib
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from engine.core.device import is_accelerator
from engine.core.precision import chosen
from engine.core.shards import DIVIDING, is_offloaded
from engine.core.timing import COLLECTIVE, Clock
from engine.data.batches.batch import Batch
from engine.distributed.data_parallel import Replicated, seed_step, unreached
from engine.distributed.group import ALONE, Group
from engine.learner.averaging import Averages, averages
from engine.learner.side_effects import untouched
from engine.learner.tuning import Tuned
from engine.losses.losses import Losses, loss_of
from engine.metrics.metrics import wanted
from engine.network.hidden_state import HiddenState
from engine.network.network import Network
from engine.network.own_layers.sync_batch_norm import SyncBatchNorm
from engine.network.placement import Placement, backward_in_order
from engine.network.tensor_plan import tensor_plan
from engine.optim.gradient_clipping import Clip, clipping
from engine.optim.gradient_scaling import GradScaling
from engine.optim.lr_schedulers import LearningRate, learning_rate
from engine.optim.parameter_options import fill, make_optimizer
from glasshouse.spec import TrainJob
from glasshouse.spec.pipeline import crossing, shared_places, stages_of

if TYPE_CHECKING:
    from engine.learner.pipelined import Pipelined
    from engine.network.fully_sharded import FullySharded
    from engine.network.tensor_parallel import TensorParallel


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
    parallel: "Replicated | FullySharded | TensorParallel | None" = None
    """The network as several processes train it: a backward pass sums the gradients over them."""
    pipeline: "Pipelined | None" = None
    """What runs the stages of a pipeline; None: each process has all layers."""
    synced: tuple[SyncBatchNorm, ...] = ()
    """The layers whose training passes exchange statistics."""

    @property
    def home(self) -> torch.device | None:
        """Where losses are computed and numbers are read back; None: all is on one device."""
        placement = self.network.placement
        return None if placement is None else placement.home

    @property
    def is_sharded(self) -> bool:
        """Whether every pass needs all processes, each of which has a part of the parameters."""
        is_divided = self.parallel is not None and self.parallel.is_sharded
        return is_divided or self.pipeline is not None

    @property
    def is_offloaded(self) -> bool:
        """Whether parameters, gradients and optimizer state are in host memory, and others not."""
        return any(map(is_offloaded, self.network.parameters()))

    def replicated(self, batch: Callable[[], Batch]) -> "Learner":
        """Return the learner of a process that has the whole network; the others have copies.

        ``batch``: makes some rows to try.
        """
        if self.group.is_alone or self.parallel is not None or self.pipeline is not None:
            return self

        def backward(values: Mapping[str, Tensor]) -> None:
            loss_of(self.loss_fn, values).total.backward()

        device = next(self.network.parameters()).device
        with untouched(self.network, device):
            once = lambda: backward(self.network(batch().tensors))  # noqa: E731
            unused = unreached(self.network, once)
        parallel = Replicated(self.network, unused)
        with untouched(self.network, device):
            # After its first pass, torch arranges the gradients anew, and with it the order of the
            # sums: do that before training, so that a resumed job has the same order.
            backward(parallel.forward(batch().tensors, is_last=True))
        return self._replace(parallel=parallel)

    def seed(self, seed: int, step: int) -> None:
        """Seed the random generators for a step, if there are several processes."""
        if not self.group.is_alone:
            seed_step(seed, step, self.group)

    def forward(self, batch: Batch, *, is_last: bool, has_rows: bool = True) -> dict[str, Tensor]:
        """Run the forward pass of a batch; ``is_last``: the last of its step.

        ``has_rows``: whether the batch is a share of the step, and not another process's rows.
        """
        for layer in self.synced:
            layer.has_rows = has_rows
        if self.parallel is None:
            return self.network(batch.tensors)
        return self.parallel.forward(batch.tensors, is_last=is_last)

    @property
    def update(self) -> Callable[[], object]:
        """Return what makes an update from the present gradients, or skips it."""
        return self.optimizer.step if self.scaling is None else self.scaling.step

    def backward(self, loss: Tensor, clock: Clock, *, is_last: bool) -> None:
        """Run the backward pass of a batch; ``is_last``: the last of its step.

        After the last gradients have been computed, a process waits for those of the others. If
        the parameters are sharded, it waits for them all along, and that is not measured.
        """
        if self.network.placement is None:
            self._backward(loss, clock, is_last=is_last)
        else:
            with backward_in_order(self.network.placement):
                self._backward(loss, clock, is_last=is_last)

    def _backward(self, loss: Tensor, clock: Clock, *, is_last: bool) -> None:
        exchange = self.parallel.exchange if isinstance(self.parallel, Replicated) else None
        if exchange is not None:
            exchange.on_bucket = partial(clock.mark, "backward")
        if self.scaling is None:
            loss.backward()
        else:
            self.scaling.backward(loss, is_last=is_last)
        clock.mark(COLLECTIVE if exchange is not None and is_last else "backward")

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
        # torch gathers the parameters of a layer for both kinds of passes into the same memory
        gradients = torch.no_grad() if self.is_sharded else torch.inference_mode()
        with averages, gradients:
            self.group.broadcast_tensors(self.network.buffers())
            self.share_copies()
            yield
        self.share_copies()  # of the newest weights, if those were averages

    def share_copies(self) -> None:
        """Give the other stages of a pipeline the newest values of the parameters they share."""
        if self.pipeline is not None:
            self.pipeline.share_copies()


def learner_of(job: TrainJob, device: torch.device, group: Group = ALONE) -> Learner:
    """Create the learner of a job on a device; ``group``: the processes that train together."""
    placement = Placement.of(job, device)
    kept_at = job.activation_boundaries
    network = Network(job.network, wanted(job), kept_at=kept_at, placement=placement)
    fill(job.network, network)  # on the host: the same on every device
    if group.is_staged:
        _keep_stages(job, network, group)
    if group.is_alone or "fsdp" not in job.parallel.axes:
        network.to_devices(device)  # else group by group: all may not fit into one
    if placement is not None:
        placement.seed(job.seed)
    home = None if placement is None else placement.home
    loss_fn = Losses.of(job).to(home or device)
    network.low_precision = chosen(job.precision, device)
    tuned = Tuned(job.memory_format, network)
    group.same_parameters()  # the first call is collective
    # before anything refers to the parameters
    parallel = _sharded(job, network, device, group)
    optimizer = make_optimizer(job.optimizer, job.network, network)
    clip = clipping(job.grad_clip, job.network, network, home, group, device)
    rate = learning_rate(job.scheduler, optimizer)
    scaling = (
        GradScaling(job.grad_scaler, optimizer, home or device)
        if network.low_precision == torch.float16
        else None
    )
    network.output_clips.scaling, network.output_clips.home = scaling, home
    network.output_clips.device = device
    synced = tuple(x for x in network.layers.values() if isinstance(x, SyncBatchNorm))
    for layer in synced:
        layer.num_peers = group.num_peers
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
        group,
        parallel,
        _pipelined(job, network, device, group),
        synced,
    )


def _keep_stages(job: TrainJob, network: Network, group: Group) -> None:
    layers, ends = job.network.layers, wanted(job)
    stages = stages_of(layers)
    own = range(group.place, 1 + max(stages.values()), group.num_peers)
    between = crossing(layers, stages, ends)
    network.keep_stages(stages, own, between, ends, job.activation_boundaries)


def _pipelined(
    job: TrainJob, network: Network, device: torch.device, group: Group
) -> "Pipelined | None":
    if not group.is_staged:
        return None
    # takes half a second to import
    from engine.learner.pipelined import Pipelined  # noqa: PLC0415

    layers = job.network.layers
    schedule = job.parallel.schedule or "1f1b"
    num_stages = 1 + max(stages_of(layers).values())
    shared = _shared_places(job, group)
    return Pipelined(network, num_stages, device, group, schedule, shared)


def _sharded(
    job: TrainJob, network: Network, device: torch.device, group: Group
) -> "FullySharded | TensorParallel | None":
    """Divide or shard a network in place, if the job asks for that."""
    sizes = job.parallel.axes
    if group.is_alone or not {"fsdp", DIVIDING} & sizes.keys():
        return None
    if DIVIDING in sizes and len(sizes) > 1:
        sizes = {"data": 1, "fsdp": 1, **sizes}  # fully_shard sums the gradients of copies too
    mesh = init_device_mesh(device.type, (*sizes.values(),), mesh_dim_names=(*sizes,))
    if DIVIDING in sizes:
        # takes half a second to import
        from engine.network.tensor_parallel import TensorParallel  # noqa: PLC0415

        plan = tensor_plan(job.network, network.layers, wanted(job), sizes[DIVIDING])
        network.divided = TensorParallel(network, plan, mesh[DIVIDING])
    if len(sizes) == 1 and network.divided is not None:
        return network.divided
    from engine.network.fully_sharded import FullySharded  # noqa: PLC0415 (as above)

    rows = tuple(name for name in sizes if name not in (DIVIDING, "pipeline"))
    shared = _shared_places(job, group)
    modules = {**network.layers, **network.copies}
    sharded = FullySharded(
        network,
        network.plans,
        mesh if len(rows) == len(sizes) else mesh[rows],
        whole=[modules[name] for name in shared if name in modules],
        is_staged=group.is_staged,
        offloads=job.parallel.cpu_offload and is_accelerator(device),
    )
    network.shard(sharded)
    return sharded


def _shared_places(job: TrainJob, group: Group) -> dict[str, tuple[int, ...]]:
    """Return the processes of a pipeline that share parameters, by the layer that has them."""
    return shared_places(job.network.layers, group.num_peers) if group.is_staged else {}
