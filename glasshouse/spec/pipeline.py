"""Which stage of a pipeline each layer is in, and what a pipeline refuses.

With ``parallel.strategy`` ``pipeline``, a process has the layers of its stages only: stage ``s`` is
in process ``s % size`` of a pipeline of ``size`` processes.
"""

from collections.abc import Iterable, Mapping, Sequence

from glasshouse.spec.network import Layer
from glasshouse.spec.parallel import Parallel
from glasshouse.spec.strict import WrongAt

_LAYERS = ("network", "layers")
_MICRO_BATCHES = ("parallel", "micro_batches")


def stages_of(layers: Sequence[Layer]) -> dict[str, int]:
    """Return the stage of each layer by its name, in order.

    A layer without ``stage`` is in the stage of the previous layer; the first one is in stage 0.
    """
    found: dict[str, int] = {}
    stage = 0
    for layer in layers:
        stage = stage if layer.stage is None else layer.stage
        found[layer.name] = stage
    return found


def num_micro_batches(parallel: Parallel, batch_size: int) -> int:
    """Return the number of micro-batches of each batch of a process, of ``batch_size`` rows.

    Default: the largest divisor of the batch size up to 4 for each process of the pipeline;
    ``interleaved`` takes the largest that torch's schedule can divide into rounds.
    """
    if parallel.micro_batches is not None:
        return parallel.micro_batches
    size = parallel.axes.get("pipeline", 1)
    is_interleaved = parallel.schedule == "interleaved"
    return next(
        number
        for number in range(min(batch_size, 4 * size), 0, -1)
        if batch_size % number == 0 and not (is_interleaved and _left_over(number, size))
    )


def num_rounds(num_micro_batches: int, size: int) -> int:
    """Return the number of rounds into which ``interleaved`` divides the micro-batches of a step.

    A process runs the micro-batches of a round through one of its stages, then through the next.
    """
    return max(1, num_micro_batches // size)


def num_stages(layers: Sequence[Layer], parallel: Parallel) -> int:
    """Return the number of stages: those that layers name, or the default of the schedule."""
    named = [layer.stage for layer in layers if layer.stage is not None]
    if named and parallel.schedule == "interleaved":
        return 1 + max(named)
    return parallel.num_stages_default


def shared_places(layers: Sequence[Layer], size: int) -> dict[str, tuple[int, ...]]:
    """Return the processes that share parameters, by the layer that has them.

    They are places in a pipeline of ``size`` processes: first that of the layer, then those of
    layers with ``shared_with`` in other processes, as both ends of tied embeddings.
    """
    stages = stages_of(layers)
    found: dict[str, dict[int, None]] = {}
    for layer in layers:
        owner = layer.shared_with or layer.name
        found.setdefault(owner, {})[stages[layer.name] % size] = None
    return {owner: tuple(places) for owner, places in found.items() if len(places) > 1}


def crossing(
    layers: Sequence[Layer], stages: Mapping[str, int], ends: Iterable[str]
) -> list[tuple[str, ...]]:
    """Return what each stage sends to the next: the names of values, in the order of the layers.

    ``layers``: with their inputs and lengths, as the plan fills them in. ``ends``: what is read
    after the forward pass, in the last stage: by losses, by metrics, and as the output. A value
    that skips stages passes through those between. Data fields are not sent: each process reads
    the rows.
    """
    last = max(stages.values())
    until: dict[str, int] = {}
    reads = [(name, stages[layer.name]) for layer in layers for name in layer.reads]
    for name, stage in [*reads, *((name, last) for name in ends)]:
        if _root(name) in stages:
            until[name] = max(stage, until.get(name, 0))
    order = {layer.name: number for number, layer in enumerate(layers)}
    names = sorted(until, key=lambda name: (order[_root(name)], name))
    return [
        tuple(name for name in names if stages[_root(name)] <= stage < until[name])
        for stage in range(last)
    ]


def check_pipeline(layers: Sequence[Layer], parallel: Parallel, batch_size: int) -> None:
    """Refuse a pipeline that cannot run. Stages that no layer names are left to the plan.

    ``batch_size``: the rows of a batch of each process.

    Raises:
        WrongAt: it names the field.
    """
    if (size := parallel.axes.get("pipeline", 1)) == 1:
        _check_unused(layers, parallel)
        return
    if (divided := parallel.axes.get("tensor", 1)) > 1:
        detail = f"tensor cannot be combined with pipeline yet: tensor is {divided}, and layers are"
        detail += " divided only in processes that have all layers: remove tensor, or combine"
        raise WrongAt("parallel", "tensor", detail=f"{detail} pipeline with data and fsdp")
    _check_micro_batches(parallel, batch_size, size)
    if any(layer.stage is not None for layer in layers):
        check_stages(layers, parallel)


def check_stages(layers: Sequence[Layer], parallel: Parallel) -> None:
    """Refuse stages of layers that cannot run.

    Raises:
        WrongAt: it names the layer.
    """
    stages, number = stages_of(layers), num_stages(layers, parallel)
    _check_number(layers, parallel, number)
    for stage in range(number):
        if stage not in stages.values():
            detail = f"stage {stage} has no layer, and the pipeline has {number} stages: set stage"
            raise WrongAt(*_LAYERS, detail=f"{detail} {stage} on a layer, or use fewer processes")
    for place in range(len(layers)):
        _check_order(layers, place, stages)


def _root(name: str) -> str:
    """Return the layer or field of a value such as ``lstm.1.0``."""
    return name.partition(".")[0]


def _left_over(number: int, size: int) -> int:
    """Return the micro-batches that ``interleaved`` cannot divide into rounds of one size."""
    return number % num_rounds(number, size)


def _check_unused(layers: Sequence[Layer], parallel: Parallel) -> None:
    """Refuse what only a pipeline reads."""
    now = f"parallel.strategy is {parallel.strategy}"
    if parallel.strategy == "pipeline":
        now = f"parallel.processes is {parallel.processes}"
    fix = "or set the strategy to pipeline with at least 2 processes"
    for name in ("schedule", "micro_batches"):
        if (value := getattr(parallel, name)) is not None:
            detail = f"{name} ({value}) needs a pipeline of several processes, and {now}: remove"
            raise WrongAt("parallel", name, detail=f"{detail} {name}, {fix}")
    for place, layer in enumerate(layers):
        if layer.stage is not None:
            detail = f"stage {layer.stage} (layer {layer.name!r}) needs a pipeline of several"
            detail += f" processes, and {now}: remove stage, {fix}"
            raise WrongAt(*_LAYERS, place, "stage", detail=detail)


def _check_micro_batches(parallel: Parallel, batch_size: int, size: int) -> None:
    number, schedule = num_micro_batches(parallel, batch_size), parallel.schedule or "1f1b"
    if batch_size % number:
        detail = f"micro_batches is {number}, and a batch of {batch_size} rows cannot be divided"
        detail += f" into {number} parts of one size: set a divisor of {batch_size}, or a batch"
        raise WrongAt(*_MICRO_BATCHES, detail=f"{detail} size that is a multiple of {number}")
    if schedule == "gpipe":
        return
    if number < size:
        detail = f"a pipeline of {size} processes needs at least {size} micro-batches with schedule"
        detail += f" {schedule}, and a batch of {batch_size} rows is divided into {number}: set"
        if parallel.micro_batches is None:
            detail += f" data.batch_size to a multiple of {size}, or schedule to gpipe"
            raise WrongAt("data", "batch_size", detail=detail)
        detail += f" micro_batches to at least {size}, with a larger batch if need be, or schedule"
        raise WrongAt(*_MICRO_BATCHES, detail=f"{detail} to gpipe")
    if schedule == "interleaved" and _left_over(number, size):
        rounds = num_rounds(number, size)
        detail = f"interleaved runs {number} micro-batches on {size} processes in {rounds} rounds,"
        detail += f" and {number} is no multiple of {rounds}: set micro_batches to a multiple of"
        raise WrongAt(*_MICRO_BATCHES, detail=f"{detail} {size}, or another schedule")


def _check_number(layers: Sequence[Layer], parallel: Parallel, number: int) -> None:
    """Check the largest stage that a layer names."""
    size = parallel.axes["pipeline"]
    place, layer = max(enumerate(layers), key=lambda one: one[1].stage or 0)
    where = (*_LAYERS, place, "stage")
    if parallel.schedule == "interleaved":
        if number % size or number < 2 * size:
            detail = f"stage {layer.stage} of layer {layer.name!r} makes {number} stages, and"
            detail += f" schedule interleaved needs a multiple of the {size} processes, at least"
            raise WrongAt(*where, detail=f"{detail} {2 * size}: change the stages, or set 1f1b")
    elif (layer.stage or 0) >= number:
        detail = f"stage {layer.stage} of layer {layer.name!r} is none of the {number} stages,"
        detail += f" which count from 0 and of which each of the {size} processes has one: set it"
        raise WrongAt(*where, detail=f"{detail} below {number}, or set schedule to interleaved")


def _check_order(layers: Sequence[Layer], place: int, stages: Mapping[str, int]) -> None:
    """Refuse a layer that reads one of a later stage: values pass forward only."""
    layer = layers[place]
    before = (layers[place - 1].name,) if place else ()
    lengths = (layer.lengths,) if layer.lengths else ()
    for name in (*(layer.inputs or before), *lengths):
        source = _root(name)
        if stages.get(source, 0) > stages[layer.name]:
            detail = f"layer {layer.name!r} in stage {stages[layer.name]} reads {source!r} in stage"
            detail += f" {stages[source]}, and values pass to later stages only: set stage to at"
            raise WrongAt(*_LAYERS, place, "stage", detail=f"{detail} least {stages[source]}")
