"""Writes the generated reference pages: ``python docs/reference/generate.py``. A test compares."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import pages_cli  # noqa: E402
import pages_client  # noqa: E402
import pages_http  # noqa: E402
import pages_pictures  # noqa: E402
import pages_spec  # noqa: E402
from cells import cell  # noqa: E402
from pydantic import BaseModel  # noqa: E402

from glasshouse import spec  # noqa: E402
from glasshouse.spec import augmentation  # noqa: E402
from models.settings import Settings  # noqa: E402

SPEC_MODELS: tuple[type[BaseModel], ...] = (
    spec.TrainJob,
    spec.Graph,
    spec.Preset,
    spec.Layer,
    spec.Init,
    spec.ParameterInit,
    spec.OutputGradClip,
    spec.Loss,
    spec.Optimizer,
    spec.SparseOptimizer,
    spec.GradScaler,
    spec.Scheduler,
    spec.Average,
    spec.GradClip,
    spec.Data,
    spec.Source,
    spec.DenseField,
    *augmentation.MODELS,
    spec.IntegerField,
    spec.IntegerSequenceField,
    spec.DenseSequenceField,
    spec.SparseBinaryField,
    spec.SparseFloatField,
    spec.Sequences,
    spec.Normalize,
    spec.Vocabulary,
    spec.LanguageModelWindows,
    spec.CbowWindows,
    spec.BucketByLength,
    spec.Shuffle,
    spec.Stop,
    spec.Early,
    spec.Evaluate,
    spec.Metric,
    spec.Devices,
    spec.Parallel,
    spec.Retry,
    spec.Probe,
    spec.Guards,
    spec.NonfiniteGuard,
    spec.MemoryGuard,
    spec.Allocator,
    spec.Checkpoint,
    spec.KeepBest,
    spec.InferJob,
    spec.InferData,
    spec.EvaluateJob,
    spec.EvaluateData,
    spec.Flatten,
    spec.ServeJob,
    spec.ServedModel,
    spec.OtherVersion,
    spec.Replicas,
    spec.Drift,
    spec.RequestLog,
    spec.DiagnoseJob,
)


def settings_page() -> str:
    """Return the page of all settings."""
    lines = [
        "# Settings",
        "",
        "Environment variables of every process of the service. Durations are in seconds, sizes in",
        "bytes. Generated from `models/settings.py`.",
        "",
        "| variable | default | what it does |",
        "|---|---|---|",
    ]
    computed = {"home": "`~/.glasshouse`", "worker_name": "the host's name"}
    for name, field in Settings.model_fields.items():
        default = computed.get(name, "" if field.default in ("", None) else f"`{field.default}`")
        lines.append(f"| `GLASSHOUSE_{name.upper()}` | {default} | {cell(field.description)} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Every generated page, by its path beside this file."""
    own = {"settings.md": settings_page(), "spec.md": pages_spec.page(SPEC_MODELS)}
    own |= {"cli.md": pages_cli.page(), "python.md": pages_client.page()}
    own["pictures.md"] = pages_pictures.page()
    return own | pages_http.pages({model.__name__ for model in SPEC_MODELS})


if __name__ == "__main__":
    for name, page in pages().items():
        path = Path(__file__).parent / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(page)
