"""What a probe of each phase may look at, checked before training. Words only."""

from engine.problems import Findings
from glasshouse.spec import TrainJob

OF_EVALUATIONS = ("output", "input", "param")


def check_phase(job: TrainJob, number: int, findings: Findings) -> None:
    """Note what a probe of evaluations asks for and cannot have."""
    probe = job.probes[number]
    if probe.phase != "evaluate":
        return
    pointer = f"/probes/{number}"
    if job.evaluate is None or job.data.validation is None:
        detail = "the job has no evaluations to look at: give it evaluate and data.validation"
        findings.problem(f"{pointer}/phase", detail, "no_evaluations")
    for position, kind in enumerate(probe.kinds):
        if kind not in OF_EVALUATIONS:
            detail = f"an evaluation computes no gradient and no update, so it has no {kind};"
            detail += f" it has: {', '.join(OF_EVALUATIONS)}"
            findings.problem(f"{pointer}/kinds/{position}", detail, "no_kind")
