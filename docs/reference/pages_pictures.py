"""The page with a picture of every view, as the browser tests take them (``make pictures``)."""

VIEWS = {
    "jobs": "The list of jobs",
    "job": "A job",
    "job-failed": "A job that failed",
    "job-logs": "Logs",
    "job-events": "Events",
    "job-checkpoints": "Checkpoints",
    "job-spec": "The spec of a job",
    "inside-layers": "The layers of a job",
    "inside-nan": "The layers of a job that met NaN",
    "inside-deep": "A thousand layers",
    "inside-graph": "The network as a graph",
    "inside-gradients": "Gradient flow",
    "inside-probes": "Probes",
    "layer-steps": "A layer over the steps",
    "layer-histograms": "A layer's histograms",
    "layer-maps": "A layer's values",
    "compare": "Jobs compared",
    "submit": "A new job",
    "predictions": "Predictions",
    "datasets": "Datasets",
    "dataset": "A dataset",
    "devices": "Devices, workers and the queue",
    "settings": "Settings",
}
"""The views, by the names of their pictures."""
SCHEMES, SIZES = ("light", "dark"), ("wide", "phone")


def file(view: str, scheme: str, size: str) -> str:
    """The picture of a view in ``docs/images``."""
    return f"{view}-{scheme}-{size}.png"


def page() -> str:
    """Every view, wide and on a phone, in light and in dark colours."""
    lines = [
        "# Every view",
        "",
        "The views of [the page](../how-to/page.md) as the browser tests see them, in light and",
        "dark colours, wide and on a phone. `make pictures` takes them anew.",
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
