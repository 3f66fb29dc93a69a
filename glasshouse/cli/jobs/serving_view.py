"""What is shown of a serve job: its models and its traffic."""

from typing import Any

from glasshouse.cli.terminal import output
from glasshouse.cli.terminal.output import figure

_SERIES = ("of", "name", "measure")
_MAX_SERIES = 20


def show(job: dict[str, Any]) -> None:
    """Print what a serve job serves, and its traffic."""
    serving: dict[str, Any] | None = job.get("serving")
    if serving is None:
        return
    output.line("")
    if not serving["models"]:
        output.line("No process of the job answers requests now.")
    rows = [[one["reference"], one["model"], one["version"]] for one in serving["models"]]
    if rows:
        output.table(["reference", "model", "version"], rows, numbers={"version"})
    output.line("")
    output.facts(_facts(serving))
    for watched in serving.get("drift") or ():
        _show_drift(watched)


def _facts(serving: dict[str, Any]) -> dict[str, Any]:
    """The counts and times of a serve job's requests, with their titles."""
    facts: dict[str, Any] = {
        "requests": f"{serving['requests']}, now {figure(serving['requests_per_s'])}/s",
        "waiting": serving["waiting"],
    }
    for key, title in (("latency_ms", "latency"), ("queue_ms", "in the queue")):
        if (times := serving[key]) is not None:
            facts[title] = f"p50 {figure(times['p50'])} ms, p99 {figure(times['p99'])} ms"
    for key in ("answered", "refused", "failed"):
        if counts := serving[key]:
            facts[key] = ", ".join(f"{name} {count}" for name, count in counts.items())
    for version, found in serving["shadows"].items():
        same = f"{found['same_classes']} of {found['requests']} with the same classes"
        facts[f"shadow {version}"] = f"{same}, largest difference {figure(found['max_difference'])}"
    if (log := serving.get("request_log")) is not None:
        facts["request log"] = f"{log['recorded']} recorded, {log['skipped']} skipped"
    return facts


def _show_drift(watched: dict[str, Any]) -> None:
    """Print how the rows that a version answered differ from its training rows."""
    drifted = [one for one in watched["series"] if one["drifted"]]
    output.line("")
    text = f"drift of {watched['model']}:{watched['version']}: {watched['state']}"
    if watched["at"] is not None:
        compared = f"{len(drifted)} of {len(watched['series'])} series"
        text += f", {compared} have drifted in the last {watched['rows']} rows"
    output.line(text if watched["detail"] is None else f"{text} ({watched['detail']})")
    if drifted:
        drifted.sort(key=lambda one: -one["psi"])
        rows = [[*(one[key] for key in _SERIES), *_psi(one)] for one in drifted[:_MAX_SERIES]]
        output.table([*_SERIES, "psi", "threshold"], rows, numbers={"psi", "threshold"})


def _psi(one: dict[str, Any]) -> list[str]:
    return [figure(one["psi"]), figure(one["threshold"])]
