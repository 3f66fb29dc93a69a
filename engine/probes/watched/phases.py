"""Check before training what a probe of each phase may watch. Without torch."""

from fnmatch import fnmatchcase

from engine.core.problems import Findings
from engine.probes.watched.select import LOSS
from glasshouse.spec import TrainJob

OF_EVALUATIONS = ("output", "input", "param")


def check_phase(job: TrainJob, number: int, findings: Findings) -> None:
    """Add findings for what a probe of evaluations asks for and cannot have."""
    probe = job.probes[number]
    if probe.phase != "evaluate":
        return
    pointer = f"/probes/{number}"
    if job.evaluate is None or job.data.validation is None:
        detail = "the job has no evaluations to look at: give it evaluate and data.validation"
        findings.problem(f"{pointer}/phase", detail, "no_evaluations")
    names = [layer.name for layer in job.network.layers]
    for position, glob in enumerate(probe.layers):
        if glob.startswith(LOSS) and not any(fnmatchcase(name, glob) for name in names):
            detail = "the loss of an evaluation is over all its batches: it is the metric"
            findings.problem(f"{pointer}/layers/{position}", f"{detail} validation/loss", "no_kind")
    for position, kind in enumerate(probe.kinds):
        if kind not in OF_EVALUATIONS:
            detail = f"an evaluation computes no gradient and no update, so it has no {kind};"
            detail += f" it has: {', '.join(OF_EVALUATIONS)}"
            findings.problem(f"{pointer}/kinds/{position}", detail, "no_kind")
