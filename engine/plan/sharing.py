"""Plan how several processes share a training: memory, messages, and what a strategy supports."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from engine.core.problems import Findings
from engine.network.tensor_plan import TensorPlan, tensor_plan
from engine.optim.optimizers import FUSED_ON_SHARDS, UNSHARDED
from glasshouse.spec import Optimizer, Parallel, TrainJob
from glasshouse.spec.strict import WrongAt

Strategy = Literal["data", "fsdp", "tensor", "pipeline"]
STRATEGIES: tuple[Literal["data", "fsdp"], ...] = ("data", "fsdp")
"""Those that divide the rows among all processes, the simplest first."""
OF_SAME_ROWS: tuple[Literal["tensor", "pipeline"], ...] = ("tensor", "pipeline")
"""Those whose processes all have the same rows, the simplest first."""
_OF_PARAMETERS = frozenset({"param", "param_grad", "update", "optim_state"})


def with_strategy(spec: TrainJob, strategy: Strategy) -> TrainJob:
    """Return the job under another strategy; ``global_batch_size`` stays what it is."""
    parallel = spec.parallel.model_copy(update={"strategy": strategy})
    other = spec.model_copy(update={"parallel": parallel})
    if (whole := spec.data.global_batch_size) is None:
        return other
    data = spec.data.model_copy(update={"batch_size": whole // other.num_shares})
    return other.model_copy(update={"data": data})


class Sharing:
    """How several processes share a training."""

    def __init__(
        self,
        spec: TrainJob,
        network: nn.Module,
        wanted: Sequence[str],
        values: Mapping[str, Tensor],
        memory_of: Callable[..., dict[str, int]],
    ) -> None:
        """``spec``: with a resolved graph.

        ``wanted``: the outputs that losses and metrics read. ``values``: the fields and outputs of
        a batch. ``memory_of``: the memory of each process.
        """
        self._spec = spec
        self._values = values
        self._network = network
        self._memory_of = memory_of
        size = spec.parallel.axes.get("tensor", 1)
        own = dict(network.named_children())
        modules = {item.name: own[item.shared_with or item.name] for item in spec.network.layers}
        self.division = tensor_plan(spec.network, modules, wanted, size) if size > 1 else None

    def check(self, findings: Findings) -> None:
        """Refuse a network of which no layer can be divided."""
        if self.division is not None and not self.division.divided:
            detail = f"no layer of the network can be divided among {self.division.size} processes:"
            detail += " Linear layers need in_features or out_features that are a multiple of that,"
            detail += " Embedding layers embedding_dim: change them, or set strategy data"
            findings.problem("/parallel", detail, "several_processes")

    def memory(self, parallel: Parallel | None = None) -> dict[str, int]:
        """Return the memory of each process; ``parallel``: instead of the job's."""
        parallel = parallel or self._spec.parallel
        return self._memory_of(
            num_shards=parallel.axes.get("fsdp", 1),
            division=self.division,
            offloads=parallel.cpu_offload,
        )

    def described(self) -> dict[str, Any] | None:
        """Return how the training is shared; None: there is one process.

        ``strategies``: what each strategy that supports the job, and keeps its batches, would take.
        """
        spec, network = self._spec, self._network
        if spec.processes == 1:
            return None
        strategies: list[dict[str, Any]] = []
        for parallel in self._others() if self.division is None else ():
            other = spec.model_copy(update={"parallel": parallel})
            if _supports(other, network):
                entry: dict[str, Any] = {"strategy": parallel.strategy}
                entry |= {"cpu_offload": parallel.cpu_offload, "memory": self.memory(parallel)}
                entry["exchanged_bytes"] = exchanged(other, network)
                entry["host_bytes"] = self._host_bytes(entry["memory"], parallel)
                strategies.append(entry)
        own: dict[str, Any] = {
            "strategy": spec.parallel.strategy,
            "cpu_offload": spec.parallel.cpu_offload,
            "memory": self.memory(),
            "exchanged_bytes": self._exchanged(),
        }
        own["host_bytes"] = self._host_bytes(own["memory"], spec.parallel)
        if self.division is not None:
            strategies.append(own)
        return {
            "strategy": spec.parallel.strategy,
            "processes": spec.processes,
            "axes": spec.parallel.axes,
            "global_batch_size": spec.global_batch_size,
            "exchanged_bytes": own["exchanged_bytes"],
            "host_bytes": own["host_bytes"],
            "cpu_offload": spec.parallel.cpu_offload,
            "divided": [] if self.division is None else sorted(self.division.divided),
            "strategies": strategies,
        }

    def _others(self) -> Iterator[Parallel]:
        """Yield what the job could say instead: without sizes, the simplest first."""
        processes = self._spec.processes
        for name in STRATEGIES:
            yield Parallel(strategy=name, processes=processes)
        yield Parallel(strategy="fsdp", processes=processes, cpu_offload=True)

    def _host_bytes(self, memory: Mapping[str, int], parallel: Parallel) -> int:
        """Return what all processes need of one host if they compute on its CPU cores.

        With ``cpu_offload``, what they need of the host of their devices: they have the whole
        network there at the beginning, and what is offloaded from then on.
        """
        processes, saved = self._spec.processes, memory["checkpoint_bytes"]
        writers = processes // parallel.axes.get("data", 1)
        if parallel.cpu_offload:
            rows, whole = memory["data_bytes"], sum(x.nbytes for x in self._network.parameters())
            later = processes * (memory["offloaded_bytes"] + rows) + writers * saved
            return max(processes * (whole + rows), later)
        return processes * (memory["total_bytes"] - saved) + writers * saved

    def _exchanged(self) -> int:
        found = exchanged(self._spec, self._network, self.division)
        if self.division is not None:
            found += _exchanged_values(self._spec, self.division, self._values)
        return found


def _supports(spec: TrainJob, network: nn.Module) -> bool:
    """Whether a job can run under its strategy."""
    findings = Findings()
    check_sharded(spec, network, findings)
    try:
        spec.check_strategy()
        spec.parallel.check_offload(spec.devices.type)
    except WrongAt:
        return False
    return not findings.problems


def exchanged(spec: TrainJob, network: nn.Module, division: TensorPlan | None = None) -> int:
    """Return what each process sends of parameters in a step, in bytes, if all exchanges are rings.

    Of a divided layer, a process has its part only.
    """
    parts = set[str]() if division is None else division.parameters(network)
    sizes = {
        name: item.nbytes // (spec.parallel.num_peers if name in parts else 1)
        for name, item in network.named_parameters()
    }
    parameters = sum(sizes.values())
    gradients = sum(sizes[name] for name, item in network.named_parameters() if item.requires_grad)
    copies, shards = (spec.parallel.axes.get(name, 1) for name in ("data", "fsdp"))
    # Gathered before each pass of a batch, or each step of a pipeline; each process then sums its
    # part of the gradients.
    num_gathers = 1 if "pipeline" in spec.parallel.axes else 2 * spec.accumulate
    gathered = num_gathers * parameters + gradients if shards > 1 else 0
    return (shards - 1) * gathered // shards + summed(gradients // shards, copies)


def summed(size_bytes: int, processes: int) -> int:
    """Return what each process sends to sum tensors over processes, in a ring."""
    return 2 * (processes - 1) * size_bytes // processes


def _exchanged_values(spec: TrainJob, division: TensorPlan, values: Mapping[str, Tensor]) -> int:
    """Return what each process sends of values and their gradients in a step, in bytes."""
    summed = gathered = 0
    for layer in spec.network.layers:
        owner, before = layer.shared_with or layer.name, values[(layer.inputs or ("",))[0]]
        own = values[layer.name].nbytes
        gradient = before.nbytes if before.is_floating_point() else 0
        if owner in division.columns:
            summed += gradient
        elif owner in division.rows or (owner in division.entries and not gradient):
            summed += own
        elif owner in division.gathered or owner in division.entries:
            gathered += own
            summed += gradient
        elif f"{owner}.linear1" in division.columns:  # the output, and the gradient of the input
            summed += 2 * own
    size = division.size
    return spec.accumulate * (size - 1) * (2 * summed + gathered) // size


def check_sharded(spec: TrainJob, network: nn.Module, findings: Findings) -> None:
    """Refuse what works only with whole parameters."""
    axes = spec.parallel.axes
    if {"fsdp", "tensor"}.isdisjoint(axes):
        return
    strategy, instead = spec.parallel.strategy, "set parallel.strategy to data"
    if spec.optimizer.type in UNSHARDED:
        detail = (
            f"{spec.optimizer.type} needs whole parameters, and with parallel.strategy {strategy}"
        )
        detail += f" each process has a part of them: {instead}, or take Adam"
        findings.problem("/optimizer/type", detail, "several_processes")
    if "tensor" in axes:
        _check_one_at_a_time(spec.optimizer, findings)
    is_fused = spec.optimizer.args.get("fused") is True
    if is_fused and spec.optimizer.type not in FUSED_ON_SHARDS:
        detail = (
            f"torch's fused {spec.optimizer.type} does not support parallel.strategy {strategy}:"
        )
        detail += f" remove fused, or take {' or '.join(FUSED_ON_SHARDS)}"
        findings.problem("/optimizer/args/fused", detail, "several_processes")
    _check_layout(spec, network, findings)
    for name, item in network.named_parameters():
        if "fsdp" in axes and not item.dim():
            detail = f"the parameter {name!r} is one number, which fsdp cannot shard: {instead}"
            findings.problem("/parallel/strategy", detail, "several_processes")
            return
    for number, probe in enumerate(spec.probes):
        keeps = not {"full", "sample"}.isdisjoint(probe.want)
        if probe.on is not None and keeps and not _OF_PARAMETERS.isdisjoint(probe.kinds):
            detail = "whole tensors of parameters are not kept when a NaN appears if each process"
            detail += " has a part of them: remove full and sample, or watch outputs"
            findings.problem(f"/probes/{number}/want", detail, "several_processes")


def _check_layout(spec: TrainJob, network: nn.Module, findings: Findings) -> None:
    """Refuse a layout that `fully_shard` does not support, which also copies divided layers."""
    axes, layout = spec.parallel.axes, spec.memory_format
    if layout == "contiguous_format" or ("fsdp" not in axes and len(axes) == 1):
        return
    for name, item in network.named_parameters():
        if item.dim() == 4:
            detail = f"torch cannot shard the parameter {name!r} in {layout}: remove memory_format,"
            findings.problem(
                "/memory_format", f"{detail} or set strategy data", "several_processes"
            )
            return


def _check_one_at_a_time(optimizer: Optimizer, findings: Findings) -> None:
    """Refuse kernels that update several parameters at once: only some of them are divided."""
    for name in ("foreach", "fused"):
        if optimizer.args.get(name) is True:
            detail = f"{name} updates many parameters at once, which torch does not support if only"
            detail += f" some are divided between processes: remove {name}"
            findings.problem(f"/optimizer/args/{name}", detail, "several_processes")
