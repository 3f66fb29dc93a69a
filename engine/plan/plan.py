"""Plan a job: every shape, its costs, and the problems of its spec, before anything runs.

Knows the words of a job and torch's meta device; allocates and computes nothing large.
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from engine.checkpoint.checkpoint import check_shapes
from engine.core.problems import Findings, SpecProblems, one
from engine.core.tensor_names import root
from engine.data.augmentation.check import check_augment
from engine.data.batches.batch_counts import BatchCounts
from engine.guards.update_gate import check_guards
from engine.learner.averaging import num_copies
from engine.losses.losses import Losses
from engine.losses.micro_batches import MicroBatches
from engine.metrics import derived, epoch_metrics, sample_predictions
from engine.metrics.metrics import metric_names, reported, wanted
from engine.network.hidden_state import check_stateful
from engine.network.network import Network, needed_layers
from engine.network.sequence_lengths import assign_lengths
from engine.network.shapes import FieldShape, Trace, trace
from engine.optim.lr_schedulers import check_scheduler
from engine.optim.optimizers import States, num_state_bytes, try_optimizer
from engine.optim.parameter_options import check_options, own_decays
from engine.plan import data as plan_data
from engine.plan import data_memory
from engine.plan.batch_plan import BatchPlan
from engine.plan.checkpointed_layers import settle_kept
from engine.plan.costs import batch_of, memory, table
from engine.plan.data import Metas
from engine.plan.diagnosis import plan_diagnosis
from engine.plan.evaluation import plan_evaluation
from engine.plan.inference import plan_inference
from engine.plan.losses import plan_losses, waiting_bytes
from engine.plan.metrics import check_accuracies
from engine.plan.pipeline import Pipeline, fullest, settle_stages
from engine.plan.placement import check_placed, parts
from engine.plan.serving import plan_serving
from engine.plan.sharing import OF_SAME_ROWS, Sharing, check_sharded, with_strategy
from engine.plan.step_memory import step_peak
from engine.probes.tensors.slices import planned
from engine.probes.watched.select import GradientPoints, check_loss_name, check_phase, select
from engine.probes.watched.watchable import Watchable, check_cuts, everything
from engine.training.memory import check_memory
from glasshouse.errors import SpecFailed
from glasshouse.spec import (
    AnyJob,
    DiagnoseJob,
    EvaluateJob,
    Field,
    IntegerField,
    IntegerSequenceField,
    Layer,
    ServeJob,
    SparseField,
    Trained,
    TrainJob,
    parse_job,
)
from glasshouse.spec.pipeline import check_pipeline
from glasshouse.spec.probes import MAX_FULL_BYTES
from glasshouse.spec.strict import WrongAt
from glasshouse.suggestions import did_you_mean


def plan(
    spec: AnyJob,
    datasets: Metas,
    trained_by: Trained | None = None,
    models: Mapping[str, Trained] = {},
) -> dict[str, Any]:
    """Plan a job; ``datasets`` are the descriptions of those it names.

    ``models``: of a serve job, what trained each model, by its reference.

    Raises:
        SpecProblems: the job cannot run as it is written.
    """
    if isinstance(spec, TrainJob):
        if spec.parallel.strategy == "auto":
            return _plan_auto(spec, datasets, trained_by)
        return _plan_network(spec, datasets, trained_by)
    if isinstance(spec, DiagnoseJob):
        return plan_diagnosis(spec)
    if isinstance(spec, ServeJob):
        return plan_serving(spec, models)
    if trained_by is None:
        raise one("/checkpoint", "the checkpoint's training job is not known", "no_network")
    if isinstance(spec, EvaluateJob):
        return plan_evaluation(spec, datasets, trained_by)
    return plan_inference(spec, datasets, trained_by)


# --- training --------------------------------------------------------------------------------


def _plan_auto(spec: TrainJob, datasets: Metas, trained_by: Trained | None) -> dict[str, Any]:
    """Plan the job under ``data``; the caller, who knows the devices, may plan it again.

    The plan has what other strategies would take. Those whose processes have the same rows keep the
    batch only if ``data.global_batch_size`` says how large it is.
    """
    found = _plan_network(with_strategy(spec, "data"), datasets, trained_by)
    if spec.processes == 1 or spec.data.global_batch_size is None:
        return found
    for strategy in OF_SAME_ROWS:
        other = with_strategy(spec, strategy)
        with contextlib.suppress(SpecProblems, WrongAt):  # it does not support the job
            other.check_strategy()
            check_pipeline(other.network.layers, other.parallel, other.data.batch_size)
            own = _plan_network(other, datasets, trained_by)["parallel"]["strategies"]
            found["parallel"]["strategies"] += own
    return found


def _plan_network(spec: TrainJob, datasets: Metas, trained_by: Trained | None) -> dict[str, Any]:
    """Replace a preset with its graph; problems of a layer then point to the preset's arguments."""
    graph = spec.network.graph()
    if graph is spec.network:
        return _plan_sources(spec, datasets, trained_by)
    try:
        found = _plan_sources(spec.model_copy(update={"network": graph}), datasets, trained_by)
    except SpecProblems as error:
        problems = [
            replace(item, pointer=_of_preset_pointer(item.pointer)) for item in error.problems
        ]
        raise SpecProblems(problems) from error
    for warning in found["warnings"]:
        warning["pointer"] = _of_preset_pointer(warning["pointer"])
    return found


def _of_preset_pointer(pointer: str) -> str:
    is_inside = pointer.startswith(("/network/layers", "/network/outputs"))
    return "/network/args" if is_inside else pointer


def _plan_sources(spec: TrainJob, datasets: Metas, trained_by: Trained | None) -> dict[str, Any]:
    """Replace several sources with one."""
    findings = Findings()
    plan_data.check_interleave(spec.data, findings)
    findings.stop()
    if not isinstance(spec.data.train, tuple):
        return _plan_training(spec, datasets, trained_by)
    joined, datasets = plan_data.joined(spec.data, datasets)
    asked = spec.model_copy(update={"data": joined})
    found = _plan_training(asked, datasets, trained_by)
    found["spec"]["data"]["train"] = [item.model_dump(mode="json") for item in spec.data.train]
    return found


def _plan_training(spec: TrainJob, datasets: Metas, trained_by: Trained | None) -> dict[str, Any]:
    findings = Findings()
    spec, datasets, shapes = _sized(spec, datasets, trained_by, findings)
    batch_plan, shapes = _batched(spec, datasets, shapes, findings)
    traced = trace(spec.network, shapes, batch_plan.batch_size, findings)
    traced = assign_lengths(traced, shapes, batch_plan.batch_size, findings)
    findings.stop()
    spec, loss = plan_losses(spec, shapes, traced, batch_plan.batch_size, findings)
    series = _check_metrics(spec, datasets, shapes, traced, findings)
    network = traced.network()
    check_options(traced.graph(), network, spec.optimizer, findings)
    check_stateful(spec, findings)
    check_cuts(traced, loss, findings)
    findings.stop()
    states = try_optimizer(spec.optimizer, network, own_decays(spec.network, network))
    batch = partial(batch_of, shapes, batch_plan.batch_size)
    whole = spec.model_copy(update={"network": traced.graph()})
    whole = _scheduled(whole, batch_plan.pace, findings)
    resolved = settle_kept(whole, wanted(whole), batch, findings)
    resolved = settle_stages(resolved, traced, network, states, findings)
    _check_start(resolved, trained_by, findings)
    _check_run(resolved, batch_plan.num_rows, network, findings)
    watchable = cache(partial(everything, spec, traced, network, loss, states))
    probes = _check_probes(spec, watchable, findings)
    learned = dict(network.named_parameters())
    graded = cache(lambda: watchable().with_gradient())
    derived.check(spec.metrics, traced.values, learned, graded, findings)
    sample_predictions.check(resolved, traced.values, batch_plan.batch_size, findings)
    _check_judged(spec, reported(spec, series), findings)
    check_guards(spec, [*shapes, *(item.layer.name for item in traced.layers), *learned], findings)
    findings.stop()
    waiting = waiting_bytes(resolved, batch_plan.pace, batch)
    memory_of = partial(
        memory,
        traced,
        network,
        num_state_bytes(states),
        data_bytes=data_memory.training_bytes(spec, datasets),
        num_averages=num_copies(spec.average),
        num_snapshots=2 if resolved.checkpoint.may_hold else 1,
        step_bytes=step_peak(resolved, wanted(resolved), batch),
        keeps_gradients=spec.accumulate > 1,
        waiting_bytes=waiting,
        kept_at=resolved.activation_boundaries,
    )
    sharing = Sharing(resolved, network, wanted(resolved), traced.values, memory_of)
    sharing.check(findings)
    findings.stop()
    needed, parallel = _shared(resolved, sharing, traced, network, states, waiting)
    return {
        "spec": resolved.model_dump(mode="json"),
        **table(traced, states),
        "memory": needed,
        "parallel": parallel,
        "probes": probes,
        "num_steps": batch_plan.num_steps,
        "sequences": batch_plan.sequences(),
        "warnings": [item.as_dict() for item in findings.warnings],
    }


def _shared(
    spec: TrainJob,
    sharing: Sharing,
    traced: Trace,
    network: nn.Module,
    states: States,
    waiting: int,
) -> tuple[dict[str, int], dict[str, Any] | None]:
    """Return the memory of a process, and how processes or devices share the training.

    ``waiting``: the bytes of batches that are in memory before their step.
    """
    needed = sharing.memory()
    if spec.parallel.strategy == "placed":
        return needed, parts(spec, traced, network, states, needed)
    if "pipeline" not in spec.parallel.axes:
        return needed, sharing.described()
    pipeline = Pipeline(spec, traced, network, states)
    processes = pipeline.memory(needed, waiting)
    return dict(fullest(processes)), pipeline.described(processes)


def _sized(
    spec: TrainJob, datasets: Metas, trained_by: Trained | None, findings: Findings
) -> tuple[TrainJob, Metas, dict[str, FieldShape]]:
    """Return the job with its fields' sizes, the datasets as it sees them, and the shapes.

    A vocabulary from the checkpoint keeps its size.
    """
    data = spec.data
    known = plan_data.window_dim(trained_by) if data.windows is not None else None
    datasets = plan_data.seen_as_windows(datasets, data.windows, data.whole, known)
    fields = plan_data.as_begun(data.fields, trained_by)
    meta = plan_data.meta_of(data.whole, datasets, "/data/train", findings)
    judged = [datasets.get(source.dataset, meta) for source in data.validations.values()]
    fields = plan_data.encoded(fields, [meta, *judged], trained_by, findings)
    findings.stop()
    shapes = plan_data.field_shapes(fields, meta, findings, data.whole)
    data = data.model_copy(update={"fields": plan_data.with_sizes(fields, shapes)})
    findings.stop()
    plan_data.check_preparing(data, meta, findings)
    check_augment(data.fields, shapes, meta, findings)
    plan_data.check_validation(data, datasets, findings)
    findings.stop()
    return spec.model_copy(update={"data": data}), datasets, shapes


def _batched(
    spec: TrainJob, datasets: Metas, shapes: Mapping[str, FieldShape], findings: Findings
) -> tuple[BatchPlan, dict[str, FieldShape]]:
    """Return how the rows become batches, and the shapes of the fields in them."""
    meta = datasets[spec.data.whole.dataset]
    data_memory.check_streaming(spec.global_data, meta, findings)
    findings.stop()
    num_rows = data_memory.rows_of(spec.data.whole, meta)
    limited = plan_data.limited(spec.data, shapes, findings)
    batch_plan = BatchPlan(spec, meta, limited, num_rows, findings)
    findings.stop()
    return batch_plan, limited


def _check_start(spec: TrainJob, trained_by: Trained | None, findings: Findings) -> None:
    """Check that the initial weights are those of such a network."""
    if spec.init is None or trained_by is None:
        return
    with torch.device("meta"):
        mine, found = (Network(job.network, ()).state_dict() for job in (spec, trained_by))
    if spec.init.missing != "fail":
        mine = {name: item for name, item in mine.items() if name in found}
    try:
        check_shapes(mine, found, partial=spec.init.missing != "fail")
    except SpecFailed as error:
        findings.problem("/init/checkpoint", error.detail, "shape")
    if spec.init.load == "all" and isinstance(trained_by, TrainJob):
        _check_rate(spec, trained_by, findings)


def _check_rate(spec: TrainJob, before: TrainJob, findings: Findings) -> None:
    """Advise on the learning rate of a job that continues with larger or smaller steps."""
    mine, theirs = (job.global_batch_size * job.accumulate for job in (spec, before))
    rates = [job.optimizer.args.get("lr") for job in (spec, before)]
    if mine == theirs or rates[0] != rates[1] or not isinstance(rates[0], (int, float)):
        return
    ratio = mine / theirs
    linear, root = (f"{rates[0] * factor:.3g}" for factor in (ratio, ratio**0.5))
    detail = f"a step has {mine} rows, the checkpoint's job had {theirs}, and lr is {rates[0]:g} as"
    detail += f" before: the usual rules give {linear} for SGD (linear) and {root} for Adam (square"
    findings.warn("/optimizer/args/lr", f"{detail} root)", "batch_size")


def _check_metrics(
    spec: TrainJob,
    datasets: Metas,
    shapes: Mapping[str, FieldShape],
    traced: Trace,
    findings: Findings,
) -> dict[str, list[str]]:
    """Check the metrics; return the series of each that torchmetrics computes, by its name."""
    check_accuracies(spec, shapes, traced, findings)
    findings.stop()
    num_rows: list[int] = []
    for place, source in spec.data.validations.items():
        num_rows.append(data_memory.rows_of(source, datasets[source.dataset]))
        if num_rows[-1] < spec.num_shares:
            detail = f"{num_rows[-1]} rows cannot be shared by {spec.processes} processes: give at"
            detail += " least a row for each"
            findings.problem(f"/data/{place}", detail, "too_few_rows")
    whole = spec.data.whole
    most = max(num_rows, default=data_memory.rows_of(whole, datasets[whole.dataset]))
    series = epoch_metrics.check(spec, traced, shapes, most, findings)
    _check_source_names(spec, findings)
    findings.stop()
    return series


def _check_source_names(spec: TrainJob, findings: Findings) -> None:
    """Refuse sources that are named like a metric: ``validation/accuracy/…`` would be either."""
    named = zip(metric_names(spec.metrics), spec.metrics, strict=True)
    metrics = {name.partition("/")[0] for name, metric in named if metric.is_evaluated}
    for place in spec.data.validations:
        _, _, name = place.partition("/")
        if name in metrics:
            detail = f"{name!r} is also the name of a metric, whose series could be read as those"
            findings.problem(f"/data/{place}", f"{detail} of a source: choose another name", "name")


def _check_reads(spec: TrainJob, findings: Findings) -> None:
    """Warn of rows and fields that nothing reads and layers that lead nowhere."""
    if spec.data.validation is not None and spec.evaluate is None:
        detail = "no evaluation reads the rows of validation: evaluate is null"
        findings.warn("/data/validation", detail, "unused_validation")
    ends = [*spec.loss_reads, *(name for item in spec.metrics for name in item.sources)]
    layers = needed_layers(spec.network, [*ends, *(spec.network.outputs or ())])
    needed = {layer.name for layer in layers}
    read = {root(name) for layer in spec.network.layers for name in layer.reads}
    for name in spec.data.fields:
        if name not in read | set(ends):
            detail = f"field {name!r} is read by no layer, loss or metric"
            findings.warn(f"/data/fields/{name}", detail, "unused_field")
    for position, layer in enumerate(spec.network.layers):
        if layer.name not in needed:
            detail = f"layer {layer.name!r} leads to no output, loss or metric"
            findings.warn(f"/network/layers/{position}", detail, "unused_layer")
        _check_embedding(position, layer, spec.data.fields, findings)


def _check_embedding(
    position: int, layer: Layer, fields: Mapping[str, Field], findings: Findings
) -> None:
    field = fields.get((layer.inputs or ("",))[0])
    size = layer.args.get("num_embeddings")
    has_ids = isinstance(field, IntegerField | IntegerSequenceField | SparseField)
    if layer.type == "PositionEmbedding":  # counts the steps, whatever their values
        return
    if has_ids and isinstance(size, int) and (dim := field.dim or 0) > size:
        detail = f"layer {layer.name!r} has {size} entries and field {(layer.inputs or ('',))[0]!r}"
        detail += f" has values up to {dim - 1}"
        findings.problem(f"/network/layers/{position}/args/num_embeddings", detail, "classes")


def _check_run(spec: TrainJob, num_rows: int, network: nn.Module, findings: Findings) -> None:
    """Check how the parts of a spec work together when it runs."""
    _check_reads(spec, findings)
    _check_counts(spec, num_rows, findings)
    _check_shared(spec, findings)
    check_sharded(spec, network, findings)
    check_placed(spec, findings)
    _check_layout(spec, network, findings)
    check_memory(spec, findings)


def _check_counts(spec: TrainJob, num_rows: int, findings: Findings) -> None:
    size = spec.global_batch_size
    if spec.data.drop_last and num_rows < size:
        detail = f"drop_last leaves no batch: the rows are {num_rows}, a batch takes {size}"
        findings.problem("/data/drop_last", detail, "no_batches")
    batch_norm = any(layer.type.startswith("BatchNorm") for layer in spec.network.layers)
    left = num_rows % size
    if batch_norm and not spec.data.drop_last and 0 < left < 2 * spec.num_shares:
        detail = "the last batch of an epoch has one row, which batch normalisation cannot train on"
        if spec.processes > 1:
            detail = f"the last batch of an epoch has {left} rows for {spec.processes} processes,"
            detail += " and batch normalisation cannot train on one row"
        findings.warn("/data/batch_size", f"{detail}; set drop_last", "single_row")


def _check_shared(spec: TrainJob, findings: Findings) -> None:
    """Refuse losses whose mean over several processes is not known before a step."""
    if spec.processes > 1 and any(MicroBatches(spec, Losses.of(spec)).are_late):
        detail = "its targets or lengths are computed by layers with parameters or dropout, so its"
        detail += " mean over several processes is not known before a step: use one process, or"
        findings.problem("/loss", f"{detail} reduction sum", "several_processes")


def _check_layout(spec: TrainJob, network: nn.Module, findings: Findings) -> None:
    """Warn of a memory format for images if there are none."""
    asked = "tune" if spec.tune else "memory_format"
    if (spec.tune or spec.memory_format != "contiguous_format") and all(
        item.dim() != 4 for item in network.parameters()
    ):
        detail = "no layer has weights for images (Conv2d, for one): it changes nothing"
        findings.warn(f"/{asked}", detail, "no_images")


def _check_judged(spec: TrainJob, known: Sequence[str], findings: Findings) -> None:
    """Check that monitored metrics exist; ``known`` are all metrics."""
    best, early, scheduler = spec.checkpoint.keep_best, spec.stop.early, spec.scheduler
    is_of_early = best is not None and early is not None and best.metric == early.metric
    if best is not None and best.metric not in known and not is_of_early:  # by default it is
        detail = f"the job has no metric {best.metric!r} to keep the best by; it has:"
        detail += f" {', '.join(known)}{did_you_mean(best.metric, known)}"
        findings.problem("/checkpoint/keep_best/metric", detail, "unknown_metric")
    judges = {
        "/stop/early/metric": None if early is None else early.metric,
        "/scheduler/metric": None if scheduler is None else scheduler.metric,
    }
    known = [name for name in known if name.startswith("validation/")]
    for pointer, metric in judges.items():
        if metric is not None and metric not in known:
            detail = f"evaluations give no {metric!r}; they give: {', '.join(known)}"
            detail += did_you_mean(metric, known)
            findings.problem(pointer, detail, "unknown_metric")


def _scheduled(spec: TrainJob, pace: BatchCounts | None, findings: Findings) -> TrainJob:
    """Return the job with its complete scheduler, which was tried."""
    if spec.scheduler is None:
        return spec
    unit = spec.scheduler.unit
    if pace is not None:
        length = pace.length(spec.stop, unit)
    else:
        length = spec.stop.steps if unit == "steps" else None
    whole = check_scheduler(spec.scheduler, spec.optimizer, length, findings)
    return spec.model_copy(update={"scheduler": whole})


# --- probes ----------------------------------------------------------------------------------


def _check_probes(
    spec: TrainJob, known: Callable[[], Watchable], findings: Findings
) -> list[dict[str, Any]]:
    if not spec.probes:
        return []
    watchable = known()
    described: list[dict[str, Any]] = []
    full_bytes = 0
    points = GradientPoints(spec)
    check_loss_name(spec, findings)
    for number, probe in enumerate(spec.probes):
        check_phase(spec, number, findings)
        seen = select(probe, number, watchable, findings)
        points.check(probe, number, seen, findings)
        size = sum(seen.values())
        if not {"full", "sample"}.isdisjoint(probe.want):
            size = planned(spec, number, seen, watchable, findings)
            full_bytes += size
        if full_bytes > MAX_FULL_BYTES:
            detail = f"whole tensors of one step would take {full_bytes} bytes with this probe; the"
            detail += f" limit is {MAX_FULL_BYTES}: name fewer layers, a slice, or want stats"
            findings.problem(f"/probes/{number}/want", detail, "too_large")
        names = list(dict.fromkeys(name.rpartition("/")[0] for name in seen))
        described.append({"matched": names, "bytes_per_step": size})
    return described


def parse_spec(spec: Mapping[str, Any]) -> AnyJob:
    """Parse a spec from JSON-like data, as strictly as from text."""
    return parse_job(json.dumps(spec))
