"""Plan a pipeline: the stage of each layer, the memory of each process, and what stages send."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.core.problems import Findings
from engine.core.tensor_names import root
from engine.metrics.derived import split
from engine.metrics.metrics import wanted
from engine.network.shapes import Trace
from engine.optim.optimizers import States
from engine.plan.cuts import LayerSizes, best_cuts
from engine.plan.placement import OF_PARAMETERS, of_each
from engine.plan.sharing import exchanged, summed
from glasshouse.spec import TrainJob
from glasshouse.spec.pipeline import (
    check_stages,
    crossing,
    num_rounds,
    num_stages,
    shared_places,
    stages_of,
)
from glasshouse.spec.strict import WrongAt

_TOTAL, _CHECKPOINT = "total_bytes", "checkpoint_bytes"
_SAVED = ("parameters_bytes", "optimizer_state_bytes", "averages_bytes")
"""What a checkpoint has of each layer."""
_OF_COPIES = _GATHERED = ("parameters_bytes", "gradients_bytes")
_SHOWN = 3
"""Number of reasons against a cut that a problem lists."""


class _Span(NamedTuple):
    """Two layers that a cut must not separate: the first, and the last that needs it."""

    first: int
    last: int
    why: str


def settle_stages(
    spec: TrainJob, traced: Trace, network: nn.Module, states: States, findings: Findings
) -> TrainJob:
    """Return the job with its schedule, its micro-batches and the stage of each layer.

    If no layer names a stage, the list of layers is cut so that the largest stage needs the least
    memory.

    Raises:
        SpecProblems: the layers cannot be divided into so many stages, or not into those that they
            name.
    """
    if "pipeline" not in spec.parallel.axes:
        return spec
    settled = {
        "schedule": spec.parallel.schedule or "1f1b",
        "micro_batches": spec.num_micro_batches,
    }
    parallel = spec.parallel.model_copy(update=settled)
    spec = spec.model_copy(update={"parallel": parallel})
    layers = spec.network.layers
    if all(layer.stage is None for layer in layers):
        stages = _divided(spec, traced, network, states, findings)
        findings.stop()
    else:
        stages = stages_of(layers)
    layers = tuple(x.model_copy(update={"stage": stages[x.name]}) for x in layers)
    graph = spec.network.model_copy(update={"layers": layers})
    spec = spec.model_copy(update={"network": graph})
    try:
        check_stages(layers, parallel)  # now with the lengths that the plan has filled in
    except WrongAt as error:
        pointer = "".join(f"/{part}" for part in error.place)
        findings.problem(pointer, str(error), "pipeline")
    _check_shared(spec, network, findings)
    _check_integers(spec, traced, findings)
    _check_metrics(spec, findings)
    findings.stop()
    return spec


# --- the stage of each layer -----------------------------------------------------------------


def _divided(
    spec: TrainJob, traced: Trace, network: nn.Module, states: States, findings: Findings
) -> dict[str, int]:
    """Return the stages of layers of which none names one."""
    layers, parallel = spec.network.layers, spec.parallel
    count = num_stages(layers, parallel)
    spans = _spans(spec, traced, network)
    change = Counter[int]()
    for span in spans:
        change[span.first + 1] += 1
        change[span.last + 1] -= 1
    num_spans = accumulate(change[place] for place in range(len(layers)))
    allowed = [place for place, number in enumerate(num_spans) if place and not number]
    if len(allowed) < count - 1:
        _report_few(spec, spans, len(allowed) + 1, findings)
        return {}
    held = [num_held(spec, stage, count) for stage in range(count)]
    cuts = best_cuts(_layer_sizes(spec, traced, network, states), allowed, held)
    numbers = accumulate(int(place in cuts) for place in range(len(layers)))
    return {layer.name: stage for layer, stage in zip(layers, numbers, strict=True)}


def _report_few(spec: TrainJob, spans: Sequence[_Span], possible: int, findings: Findings) -> None:
    layers = spec.network.layers
    needed = num_stages(layers, spec.parallel)
    detail = f"a pipeline of {spec.parallel.axes['pipeline']} processes needs {needed} stages, and"
    detail += f" the {len(layers)} layers can be cut into {possible} at most"
    widest = sorted(spans, key=lambda span: span.first - span.last)[:_SHOWN]
    detail += "".join(f"; {span.why}" for span in widest)
    fix = "use fewer processes, or set strategy to data, fsdp or tensor"
    findings.problem("/parallel", f"{detail}: {fix}", "too_few_stages")


def _spans(spec: TrainJob, traced: Trace, network: nn.Module) -> list[_Span]:
    """Return the layers that a cut must not separate."""
    layers = spec.network.layers
    places = {layer.name: place for place, layer in enumerate(layers)}
    found: list[_Span] = []
    for place, layer in enumerate(layers):
        if (owner := layer.shared_with) is not None and _has_buffers(network, owner):
            why = f"{owner!r} and {layer.name!r} share running statistics, and must be in one stage"
            found.append(_Span(places[owner], place, why))
    for name, last in _until(spec, traced).items():
        first = places[root(name)]
        if last > first and not _is_sent(traced, name):
            reader = (
                repr(layers[last].name) if last < len(layers) else "a loss, a metric or the output"
            )
            why = f"{reader} reads {name!r}, whose values are integers, which stages do not send"
            found.append(_Span(first, min(last, len(layers) - 1), why))
    return found


def _has_buffers(network: nn.Module, name: str) -> bool:
    """Whether a layer changes values in a forward pass, which copies of it would not see."""
    return any(True for _ in dict(network.named_children())[name].buffers())


def _check_shared(spec: TrainJob, network: nn.Module, findings: Findings) -> None:
    """Refuse layers of several stages that share more than parameters."""
    layers, stages = spec.network.layers, stages_of(spec.network.layers)
    for place, layer in enumerate(layers):
        owner = layer.shared_with
        if owner is None or stages[layer.name] == stages[owner] or not _has_buffers(network, owner):
            continue
        detail = f"layer {layer.name!r} in stage {stages[layer.name]} shares the running statistics"
        detail += f" of {owner!r} in stage {stages[owner]}: both must be in one stage; set the same"
        findings.problem(f"/network/layers/{place}/stage", f"{detail} stage", "pipeline")


def _until(spec: TrainJob, traced: Trace) -> dict[str, int]:
    """Return the place of the last layer that reads each value.

    What is read after the forward pass, by losses for one, is read after the last layer.
    """
    layers = spec.network.layers
    names = {layer.name for layer in layers}
    reads = [(name, place) for place, layer in enumerate(layers) for name in layer.reads]
    reads += [(name, len(layers)) for name in wanted(spec)]
    return {name: place for name, place in reads if name in traced.values and root(name) in names}


def _is_sent(traced: Trace, name: str) -> bool:
    """Whether stages can send a value: its gradient comes back, so it is floating point."""
    found = traced.values.get(name)
    return found is None or found.dtype.is_floating_point


def _check_integers(spec: TrainJob, traced: Trace, findings: Findings) -> None:
    """Refuse integers that a later stage reads."""
    layers, stages = spec.network.layers, stages_of(spec.network.layers)
    for place, layer in enumerate(layers):
        for name in layer.reads:
            crosses = stages.get(root(name), stages[layer.name]) != stages[layer.name]
            if crosses and not _is_sent(traced, name):
                detail = f"layer {layer.name!r} reads {name!r} of stage {stages[root(name)]}, whose"
                detail += " values are integers, which stages do not send: set stage of both layers"
                detail += " to the same number"
                findings.problem(f"/network/layers/{place}/stage", detail, "pipeline")
    places = {layer.name: place for place, layer in enumerate(layers)}
    last = max(stages.values())
    for name in wanted(spec):
        if stages.get(root(name), last) != last and not _is_sent(traced, name):
            detail = f"a loss, a metric or the output reads {name!r}, whose values are integers,"
            detail += (
                f" which stages do not send: set stage of {root(name)!r} to the last one, {last}"
            )
            findings.problem(f"/network/layers/{places[root(name)]}/stage", detail, "pipeline")


def _check_metrics(spec: TrainJob, findings: Findings) -> None:
    """Refuse metrics of training batches that read parameters: process 0 gets only outputs."""
    for number, metric in enumerate(spec.metrics):
        for place, reference in enumerate(() if metric.is_evaluated else metric.inputs):
            name, kind = split(reference)
            if kind in ("param", "param_grad", "update"):
                detail = f"{metric.type} reads {reference!r}, and with a pipeline a metric reads"
                detail += f" outputs and their gradients only: watch {name!r} with a probe, or set"
                detail += " parallel.strategy to data"
                findings.problem(f"/metrics/{number}/inputs/{place}", detail, "pipeline")


# --- memory ----------------------------------------------------------------------------------


def num_held(spec: TrainJob, stage: int, count: int) -> int:
    """Return the most micro-batches whose activations a stage keeps at once.

    ``count``: the number of stages. ``gpipe``: all. ``1f1b``: as many as there are stages from this
    one to the last. ``interleaved``: in torch's order of passes, in which a process runs the
    micro-batches of a round through one of its stages, then through the next.
    """
    number, schedule = spec.num_micro_batches, spec.parallel.schedule
    if schedule == "gpipe":
        return number
    if schedule != "interleaved":
        return min(number, count - stage)
    size = spec.parallel.axes["pipeline"]
    local, rank, own = stage // size, stage % size, count // size
    per_round = number // num_rounds(number, size)
    warmup = min(number * own, (own - 1) * per_round + 2 * (size - 1 - rank))

    def passes(done: int, place: int) -> int:
        """Return how many of the first ``done`` passes of a process are those of a stage."""
        whole, rest = divmod(done, per_round * own)
        return whole * per_round + min(per_round, max(0, rest - place * per_round))

    # After the warm-up, forward and backward passes alternate, and each round is as the first one.
    return max(
        passes(min(number * own, warmup + done + 1), local) - passes(done, own - 1 - local)
        for done in range(per_round * own)
    )


def _layer_sizes(spec: TrainJob, traced: Trace, network: nn.Module, states: States) -> LayerSizes:
    layers, number = spec.network.layers, spec.num_micro_batches
    of_owner = of_each(spec, network, states)
    num_shards = spec.parallel.axes.get("fsdp", 1)
    of_parameters = [
        sum(_sharded(of_owner.get(x.name, {}), num_shards).values())
        + _copy_bytes(of_owner, x.shared_with)
        for x in layers
    ]
    made = Counter[str]()
    for item in _outputs(spec, traced):
        made[item.layer] += item.num_bytes
    change = [0] * (len(layers) + 2)
    places = {layer.name: place for place, layer in enumerate(layers)}
    for name, last in _until(spec, traced).items():
        size = traced.values[name].nbytes
        change[places[root(name)] + 1] += size
        change[last + 1] -= size
    received = list(accumulate(change))[: len(layers)]
    whole = [made[layer.name] for layer in layers], received
    micro = [[size // number for size in sizes] for sizes in whole]
    return LayerSizes(of_parameters, *micro)


def _sharded(heads: Mapping[str, int], num_shards: int) -> dict[str, int]:
    """Return the memory of a layer whose parameters processes shard, and gather for each step."""
    if num_shards == 1:
        return dict(heads)
    parts = {name: -(-size // num_shards) for name, size in heads.items()}
    return {**parts, "gathered_bytes": sum(heads.get(name, 0) for name in _GATHERED)}


def _copy_bytes(of_owner: Mapping[str, Mapping[str, int]], owner: str | None) -> int:
    """Return the bytes of a copy of parameters that another process trains."""
    return 0 if owner is None else sum(of_owner[owner][name] for name in _OF_COPIES)


class _Output(NamedTuple):
    """Memory that a layer allocates for its outputs."""

    layer: str
    num_bytes: int
    """For a whole batch."""
    readers: frozenset[str | None]
    """The layers that read it, or a view of it; None: it is read after the forward pass."""


def _outputs(spec: TrainJob, traced: Trace) -> list[_Output]:
    layers = {item.layer.name for item in traced.layers}
    reads = [(name, item.layer.name) for item in traced.layers for name in item.layer.reads]
    readers: dict[int, set[str | None]] = {}
    for name, reader in [*reads, *((name, None) for name in wanted(spec))]:
        if name in traced.values and root(name) in layers:
            readers.setdefault(_key(traced.values[name]), set()).add(reader)
    seen = {_key(item) for item in _fields(traced)}
    found: list[_Output] = []
    for item in traced.layers:
        storages = {_key(leaf): leaf.untyped_storage().nbytes() for leaf in item.outputs.values()}
        found += [
            _Output(item.layer.name, size, frozenset(readers.get(key, ())))
            for key, size in storages.items()
            if key not in seen
        ]
        seen |= storages.keys()
    return found


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _fields(traced: Trace) -> list[torch.Tensor]:
    """Return the data fields of a batch."""
    layers = {item.layer.name for item in traced.layers}
    return [item for name, item in traced.values.items() if root(name) not in layers]


def fullest(processes: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
    """Return the memory of the process that needs the most."""
    return max(processes, key=lambda heads: heads[_TOTAL])


class Pipeline:
    """The stages of a job whose layers all have one."""

    def __init__(self, spec: TrainJob, traced: Trace, network: nn.Module, states: States) -> None:
        """``spec``: as `settle_stages` has returned it."""
        self._spec, self._traced, self._network = spec, traced, network
        self._where = stages_of(spec.network.layers)
        self._count = num_stages(spec.network.layers, spec.parallel)
        self._size = spec.parallel.axes["pipeline"]
        self._num_shards = spec.parallel.axes.get("fsdp", 1)
        self._shared = {*shared_places(spec.network.layers, self._size)}
        """The layers that several processes have. They are not sharded."""
        self._outputs, self._of_owner = _outputs(spec, traced), of_each(spec, network, states)
        self._sent = crossing(spec.network.layers, self._where, wanted(spec))
        self._stages = [self._stage(stage) for stage in range(self._count)]

    def memory(self, whole: Mapping[str, int], waiting_bytes: int) -> list[dict[str, int]]:
        """Return the memory of each process of the pipeline.

        ``whole``: the memory of one process with all layers. ``waiting_bytes``: the batches of a
        step that are in memory before it begins. Each process has the rows and its whole batch.
        """
        batch = sum(item.nbytes for item in _fields(self._traced))
        processes: list[dict[str, int]] = []
        for process in range(self._size):
            heads = Counter[str]()
            for stage in self._stages[process :: self._size]:
                heads.update({name: x for name, x in stage["memory"].items() if name != _TOTAL})
            heads["activations_bytes"] += batch + waiting_bytes
            saved = whole[_CHECKPOINT] * sum(heads[name] for name in _SAVED)
            heads[_CHECKPOINT] = saved // max(1, sum(whole[name] for name in _SAVED))
            heads["data_bytes"] = whole["data_bytes"]
            processes.append({**heads, _TOTAL: sum(heads.values())})
        return processes

    def described(self, processes: Sequence[Mapping[str, int]]) -> dict[str, Any]:
        """Return how the training is shared; ``processes``: the memory of each.

        ``bubble``: the fraction of its time in which a process waits if all stages take equally
        long (Narayanan et al., 2021).
        """
        spec, parallel = self._spec, self._spec.parallel
        number, per_process = spec.num_micro_batches, self._count // self._size
        sent = max(self._exchanged(process) for process in range(self._size))
        held = sum(heads[_TOTAL] - heads[_CHECKPOINT] for heads in processes) * spec.num_shares
        own = {
            "strategy": "pipeline",
            "memory": dict(fullest(processes)),
            "exchanged_bytes": sent,
            "host_bytes": held + self._num_shards * sum(heads[_CHECKPOINT] for heads in processes),
        }
        return {
            "strategy": "pipeline",
            "processes": spec.processes,
            "axes": parallel.axes,
            "global_batch_size": spec.global_batch_size,
            "exchanged_bytes": sent,
            "host_bytes": own["host_bytes"],
            "divided": [],
            "strategies": [own],
            "stages": self._stages,
            "schedule": parallel.schedule,
            "micro_batches": number,
            "bubble": (self._size - 1) / (per_process * number + self._size - 1),
        }

    def _stage(self, stage: int) -> dict[str, Any]:
        where = self._where
        heads = Counter[str](dict.fromkeys(OF_PARAMETERS, 0))
        for owner, own in self._of_owner.items():
            if where[owner] == stage:
                heads.update(_sharded(own, 1 if owner in self._shared else self._num_shards))
        for owner in self._copied(stage):
            for name in _OF_COPIES:
                heads[name] += self._of_owner[owner][name]
        heads["activations_bytes"] = self._activations(stage)
        return {
            "stage": stage,
            "process": stage % self._size,
            "layers": [name for name, at in where.items() if at == stage],
            "memory": {**heads, _TOTAL: sum(heads.values())},
            "sent_bytes": self._sent_bytes(stage),
        }

    def _activations(self, stage: int) -> int:
        """Return the bytes of outputs, and of received values, of all micro-batches at once.

        Of activation checkpointing, what is freed and computed again counts once, and the segment
        that has the most of it. A segment is between two boundaries of the stage.
        """
        layers = [name for name, at in self._where.items() if at == stage]
        ends = [x for x, name in enumerate(layers) if name in self._spec.activation_boundaries]
        segments = [{*layers[begin:end]} for begin, end in pairwise(ends)]
        made = [item for item in self._outputs if self._where[item.layer] == stage]
        freed = [
            sum(x.num_bytes for x in made if x.layer in segment and x.readers <= segment)
            for segment in segments
        ]
        received = sum(self._traced.values[name].nbytes for name in self._received(stage))
        kept = sum(item.num_bytes for item in made) - sum(freed) + received
        held = num_held(self._spec, stage, self._count)
        return (held * kept + max(freed, default=0)) // self._spec.num_micro_batches

    def _copied(self, stage: int) -> set[str]:
        """Return the layers of other processes whose parameters layers of a stage share."""
        return {
            owner
            for layer in self._spec.network.layers
            if self._where[layer.name] == stage and (owner := layer.shared_with) is not None
            if (self._where[owner] - stage) % self._size
        }

    def _received(self, stage: int) -> tuple[str, ...]:
        return self._sent[stage - 1] if stage else ()

    def _sent_bytes(self, stage: int) -> int:
        """Return the bytes that a stage sends in a step: values, and gradients of those it got.

        And parameters that other processes have copies of, and the gradients of such copies.
        """
        values, layers = self._traced.values, self._spec.network.layers
        shared = sum(self._of_owner[owner]["gradients_bytes"] for owner in self._copied(stage))
        for owner, places in shared_places(layers, self._size).items():
            if self._where[owner] == stage:
                shared += (len(places) - 1) * self._of_owner[owner]["parameters_bytes"]
        forward = [values[name] for name in (*self._sent, ())[stage]]
        backward = [x for name in self._received(stage) if (x := values[name]).requires_grad]
        sent = sum(item.nbytes for item in [*forward, *backward])
        return self._spec.accumulate * sent + shared

    def _exchanged(self, process: int) -> int:
        """Return what a process sends in a step: to other stages, and to copies of its own."""
        copied = exchanged(self._spec, self._modules(process, are_shared=False))
        shared = [
            x for x in self._modules(process, are_shared=True).parameters() if x.requires_grad
        ]
        copied += summed(sum(item.nbytes for item in shared), self._spec.num_shares)
        return copied + sum(stage["sent_bytes"] for stage in self._stages[process :: self._size])

    def _modules(self, process: int, *, are_shared: bool) -> nn.ModuleDict:
        """Return the modules of the layers of a process: those that others have too, or not."""
        found = nn.ModuleDict()
        own = {
            name: module
            for name, module in self._network.named_children()
            if self._where[name] % self._size == process and (name in self._shared) == are_shared
        }
        found._modules.update(own)  # pyright: ignore[reportPrivateUsage] - its methods refuse some names
        return found
