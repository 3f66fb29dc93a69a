"""Generates the page with a screenshot of every view, which ``make pictures`` takes."""

VIEWS = {
    "jobs": "The list of jobs",
    "job": "A job",
    "job-processes": "The processes of a job",
    "job-failed": "A failed job",
    "job-logs": "Logs",
    "job-events": "Events",
    "job-checkpoints": "Checkpoints",
    "job-spec": "A job's spec",
    "inside-layers": "A job's layers",
    "inside-nan": "The layers of a job with NaN",
    "inside-deep": "A thousand layers",
    "inside-graph": "The network as a graph",
    "inside-gradients": "Gradient flow",
    "inside-probes": "Probes",
    "layer-steps": "A layer over steps",
    "layer-histograms": "A layer's histograms",
    "layer-maps": "A layer's values",
    "compare": "Comparing jobs",
    "submit": "A new job",
    "predictions": "Predictions",
    "datasets": "Datasets",
    "dataset": "A dataset",
    "models": "Models",
    "model": "A model",
    "devices": "Devices, workers and the queue",
    "settings": "Settings",
}
"""Titles of the views by the names of their screenshots."""
SCHEMES, SIZES = ("light", "dark"), ("wide", "phone")


def file(view: str, scheme: str, size: str) -> str:
    """Return the file name of a screenshot in ``docs/images``."""
    return f"{view}-{scheme}-{size}.png"


def page() -> str:
    """Return the page: every view, wide and on a phone, in light and dark colors."""
    lines = [
        "# Every view",
        "",
        "The views of [the dashboard](../how-to/page.md) in light and dark colors, wide and on a",
        "phone. `make pictures` updates these screenshots.",
    ]
    for view, title in VIEWS.items():
        lines += ["", f"## {title}", "", "| light | dark |", "|---|---|"]
        for size in SIZES:
            shown = [_shown(view, title, scheme, size) for scheme in SCHEMES]
            lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _shown(view: str, title: str, scheme: str, size: str) -> str:
    how = {"wide": "wide", "phone": "on a phone"}[size]
    return f"![{title}, {how}, {scheme}](../images/{file(view, scheme, size)})"
