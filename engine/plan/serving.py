"""Plan a serve job: the memory of its models, and whether their networks can run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from engine.core.problems import Findings, one
from engine.core.tensor_names import root
from engine.data.augmentation.augmenting import unchanged
from engine.inference.rows import inline_shapes
from engine.network.shapes import Trace, trace
from engine.plan.costs import memory, table
from engine.serving.redaction import problems_of
from glasshouse.spec import ServeJob, Trained
from glasshouse.suggestions import did_you_mean

PLANNED_STEPS = 128
"""The steps of a sequence whose length the training did not limit."""
_LISTED = 20


def plan_serving(spec: ServeJob, models: Mapping[str, Trained]) -> dict[str, Any]:
    """Plan a job that serves models; ``models``: what each reference names now.

    Raises:
        SpecProblems: a network cannot run.
    """
    findings = Findings()
    if spec.request_log is not None:
        for pointer, detail in problems_of(spec.request_log, models.values()):
            findings.problem(pointer, detail, "unknown_field")
    traced = [_traced(spec, trained, findings) for trained in models.values()]
    _check_watched(spec, traced, findings)
    findings.stop()
    if not traced:
        raise one("/models", "there is no model to serve", "no_network")
    heads = [memory(found, found.network(), 0, data_bytes=0, training=False) for found in traced]
    whole = {key: sum(head[key] for head in heads) for key in heads[0]}
    largest = max(head["activations_bytes"] for head in heads)  # one batch at a time
    whole["total_bytes"] -= whole["activations_bytes"] - largest
    whole["activations_bytes"] = largest
    return {
        "spec": spec.model_dump(mode="json"),
        **table(traced[0]),
        "memory": whole,
        "parallel": None,
        "probes": [],
        "num_steps": None,
        "warnings": [item.as_dict() for item in findings.warnings],
    }


def _check_watched(spec: ServeJob, traced: Sequence[Trace], findings: Findings) -> None:
    """Check that each glob of layers to watch matches a layer of one of the networks."""
    globs = None if spec.drift is None else spec.drift.layers
    names = [item.layer.name for found in traced for item in found.layers]
    outputs = [name for found in traced for name in found.values if root(name) in names]
    for number, glob in enumerate(globs or ()):
        if not any(fnmatchcase(name, glob) for name in (*names, *outputs)):
            detail = f"no layer matches {glob!r}{did_you_mean(glob, names)}; the networks have:"
            shown = ", ".join([*dict.fromkeys(names)][:_LISTED])
            findings.problem(f"/drift/layers/{number}", f"{detail} {shown}", "unknown_layer")


def _traced(spec: ServeJob, trained: Trained, findings: Findings) -> Trace:
    """Trace the outputs of a network for a whole batch."""
    graph = trained.network
    read = {root(name) for layer in graph.layers for name in layer.reads}
    fields = {n: unchanged(field) for n, field in trained.data.fields.items() if n in read}
    shapes = inline_shapes(fields)
    limit = trained.data.sequence.max_length or PLANNED_STEPS
    for name, shape in shapes.items():
        if shape.is_sequence:
            shapes[name] = replace(shape, shape=(limit, *shape.shape[1:]))
    return trace(graph, shapes, spec.max_batch_size, findings)
