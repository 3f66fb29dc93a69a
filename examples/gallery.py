"""Ten trainings that go wrong, each beside one that does not: docs/tutorials/gallery.md.

``python examples/gallery.py`` runs them in this process and prints their figures. It needs the
service installed, but none that runs. Names of problems run only those. ``--pictures FOLDER``
stores a picture of each run. ``--service`` uses the running service instead, so that you can open
the jobs in the dashboard.
"""

import argparse
import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import glasshouse as gh
from glasshouse.client import Job

Spec = dict[str, Any]
Figures = dict[str, float]

DIGITS: Spec = {
    "network": {"type": "preset", "preset": "mlp", "args": {"hidden": [64, 64], "num_outputs": 10}},
    "loss": {"type": "CrossEntropyLoss", "inputs": ["out", "label"]},
    "optimizer": {"type": "SGD", "args": {"lr": 0.1}},
    "data": {
        "train": {"dataset": "digits", "split": "train"},
        "validation": {"dataset": "digits", "split": "validation"},
        "fields": {
            "x": {"type": "dense", "column": "image", "shape": [64]},
            "label": {"type": "integer", "dim": 10},
        },
        "batch_size": 32,
    },
    "metrics": [{"type": "accuracy", "inputs": ["out", "label"]}],
    "evaluate": {"every_epochs": 1},
    "stop": {"epochs": 5},
    "seed": 1,
    "devices": {"type": "cpu", "threads": 1},
}
"""The spec that each problem changes."""

FLATS: Spec = {
    "network": {"args": {"hidden": [16], "num_outputs": 4}},
    "data": {
        "train": {"dataset": "flats"},
        "validation": {"dataset": "flats"},
        "fields": {
            "x": {"column": None, "shape": None, "columns": ["rooms", "area_cm2"]},
            "label": {"dim": 4},
        },
    },
}
"""What differs where the data is the table that `flats` makes."""


@dataclass(frozen=True)
class Case:
    """A problem: two runs that differ in a few fields of their specs, and what to compare."""

    problem: Spec
    """A merge patch of the spec: the fields that cause the problem."""
    fix: Spec
    """The same fields, right."""
    figures: Callable[[Job], Figures]
    plot: dict[str, str]
    """What shows the problem: the arguments of `Job.plot`."""
    common: Spec
    """A merge patch for both runs."""

    @property
    def specs(self) -> tuple[Spec, Spec]:
        """The whole specs of both runs."""
        common = merged(DIGITS, self.common)
        return merged(common, self.problem), merged(common, self.fix)


def merged(spec: Spec, patch: Spec) -> Spec:
    """A spec with a JSON merge patch applied, as in `Job.fork`."""
    result = copy.deepcopy(spec)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict) and isinstance(result.get(name), dict):
            result[name] = merged(result[name], value)
        else:
            result[name] = copy.deepcopy(value)
    return result


def flats() -> dict[str, dict[str, np.ndarray]]:
    """Two columns of different units, four classes, and training rows that are sorted by class."""
    generator = np.random.default_rng(0)
    splits: dict[str, dict[str, np.ndarray]] = {}
    for split, num in (("train", 1200), ("validation", 400)):
        label = generator.integers(0, 4, num)
        label = np.sort(label) if split == "train" else label
        rooms = 2 + 2 * (label % 2) + generator.normal(0, 0.4, num)
        area = 500_000 + 400_000 * (label // 2) + generator.normal(0, 80_000, num)
        splits[split] = {
            "rooms": rooms.astype(np.float32),
            "area_cm2": area.astype(np.float32),
            "label": label,
        }
    return splits


# --- figures -----------------------------------------------------------------------------------


def last(job: Job, *names: str) -> Figures:
    """The last value of some metrics."""
    found = job.metrics()
    return {f"`{name}`, last": float(found[name]["last"]) for name in names}


def lowest(job: Job, name: str) -> Figures:
    return {f"`{name}`, min": float(job.metrics(name).numpy().min())}


def statistic(job: Job, layer: str, kind: str, name: str) -> Any:
    """One statistic of a watched tensor, at each step."""
    return job.layers[layer].stats(kind)[name]


def jumping(job: Job) -> Figures:
    highest = {"`loss`, max": float(job.metrics("loss").numpy().max())}
    return highest | last(job, "loss", "validation/accuracy")


def vanishing(job: Job) -> Figures:
    norms = {
        f"gradient norm of `{name}`, last": float(statistic(job, name, "param_grad", "l2")[-1])
        for name in ("fc1.weight", "out.weight")
    }
    return norms | last(job, "validation/accuracy")


def dead(job: Job) -> Figures:
    zeros = {
        f"zeros in the output of `{name}`, last": float(statistic(job, name, "output", "zeros")[-1])
        for name in ("act1", "act2")
    }
    return zeros | last(job, "validation/accuracy")


def overfitting(job: Job) -> Figures:
    lows = lowest(job, "validation/loss")
    return last(job, "loss", "validation/loss") | lows | last(job, "validation/accuracy")


def slow(job: Job) -> Figures:
    ratio = float(np.median(job.metrics("update/weight").numpy()))
    return {"update/weight of `fc1`, median": ratio} | last(job, "loss", "validation/accuracy")


def uneven(job: Job) -> Figures:
    warned = sum(warning["code"] == "uneven_scale" for warning in job.warnings)
    return {"warnings `uneven_scale`": warned} | last(job, "loss", "validation/accuracy")


def nonfinite(job: Job) -> Figures:
    findings = list(job.events(types=["finding"]))
    for finding in findings[:1]:
        print(f"{finding.message}\n")
    losses = job.metrics("loss").numpy()
    return {
        "findings": len(findings),
        "steps whose loss is NaN or Inf": int((~np.isfinite(losses)).sum()),
    } | last(job, "validation/accuracy")


def saturated(job: Job) -> Figures:
    return lowest(job, "loss") | last(job, "validation/accuracy")


def evaluated(job: Job) -> Figures:
    return last(job, "loss", "validation/loss", "validation/accuracy")


# --- problems ----------------------------------------------------------------------------------


def sgd(lr: float) -> Spec:
    return {"optimizer": {"type": "SGD", "args": {"lr": lr}}}


def adam(lr: float) -> Spec:
    return {"optimizer": {"type": "Adam", "args": {"lr": lr}}}


def network(**args: Any) -> Spec:
    return {"network": {"args": args}}


def watch(layers: str, kind: str, *want: str) -> Spec:
    """A probe that watches every fifth step, whatever that costs."""
    probe = {"layers": [layers], "kinds": [kind], "every": 5, "max_overhead": None}
    return {"probes": [{**probe, "want": ["stats", *want]}]}


def graph(*layers: Spec) -> Spec:
    """A network with one hidden layer; some layers, then the last one under the name ``out``."""
    *between, final = layers
    flat = {"name": "flat", "type": "Flatten"}
    hidden = {"name": "fc1", "type": "Linear", "args": {"out_features": 64}}
    layers = (flat, hidden, *between, {"name": "out", **final})
    return {"network": {"type": "graph", "layers": [*layers]}}


NO_PRESET: Spec = {"network": {"preset": None, "args": None}}
CLASSES: Spec = {"name": "scores", "type": "Linear", "args": {"out_features": 10}}
LOSS = {"name": "loss"}
CASES: dict[str, Case] = {
    "learning-rate-too-high": Case(sgd(5.0), sgd(0.1), jumping, LOSS, {}),
    "learning-rate-too-low": Case(
        sgd(0.0001),
        sgd(0.1),
        slow,
        LOSS,
        {
            "metrics": [
                *DIGITS["metrics"],
                {
                    "type": "l2_ratio",
                    "name": "update/weight",
                    "inputs": ["fc1.weight/update", "fc1.weight/param"],
                },
            ]
        },
    ),
    "vanishing-gradients": Case(
        network(activation="Sigmoid"),
        network(activation="Tanh"),
        vanishing,
        {"name": "gradient_flow", "layer": "*.weight"},
        {
            **network(hidden=[32, 32, 32, 32, 32, 32]),
            **watch("*.weight", "param_grad"),
            "stop": {"epochs": 15},
        },
    ),
    "dead-relus": Case(
        adam(0.3),
        adam(0.003),
        dead,
        {"name": "histogram", "layer": "fc2", "kind": "output"},
        watch("*", "output", "histogram"),
    ),
    "overfitting": Case(
        {"data": {"train": {"fraction": [0, 0.05]}}, "stop": {"epochs": 60}},
        {"data": {"train": {"fraction": [0, 1]}}, "stop": {"epochs": 3}},
        overfitting,
        LOSS,
        {**network(hidden=[256, 256]), **adam(0.003)},
    ),
    "unnormalized-inputs": Case(
        {"data": {"normalize": {}}},
        {"data": {"normalize": {"x": {"type": "standard"}}}},
        uneven,
        LOSS,
        FLATS,
    ),
    "log-of-zero": Case(
        graph(
            {"name": "relu", "type": "ReLU"},
            CLASSES,
            {"name": "sharp", "type": "mul", "args": {"other": 500}},
            {"name": "softmax", "type": "Softmax", "args": {"dim": 1}},
            {"type": "log"},
        ),
        graph(
            {"name": "relu", "type": "ReLU"},
            CLASSES,
            {"name": "sharp", "type": "mul", "args": {"other": 500}},
            {"type": "LogSoftmax", "args": {"dim": 1}},
        ),
        nonfinite,
        LOSS,
        {**NO_PRESET, **adam(0.003), "loss": {"type": "NLLLoss"}},
    ),
    "softmax-before-cross-entropy": Case(
        graph({"name": "relu", "type": "ReLU"}, CLASSES, {"type": "Softmax", "args": {"dim": 1}}),
        graph({"name": "relu", "type": "ReLU"}, {**CLASSES, "name": "out"}),
        saturated,
        LOSS,
        {**NO_PRESET, **adam(0.003)},
    ),
    "no-shuffling": Case(
        {"data": {"shuffle": {"enabled": False}}},
        {"data": {"shuffle": {"enabled": True}}},
        evaluated,
        LOSS,
        merged(FLATS, {"data": {"normalize": {"x": {"type": "standard"}}, "batch_size": 4}}),
    ),
    "tiny-batches": Case(
        graph(
            {"name": "norm", "type": "BatchNorm1d"},
            {"name": "relu", "type": "ReLU"},
            {**CLASSES, "name": "out"},
        ),
        graph(
            {"name": "norm", "type": "LayerNorm"},
            {"name": "relu", "type": "ReLU"},
            {**CLASSES, "name": "out"},
        ),
        evaluated,
        LOSS,
        {**NO_PRESET, "data": {"batch_size": 2, "drop_last": True}},
    ),
}


# --- running -----------------------------------------------------------------------------------


def prepare(client: gh.Client) -> None:
    """Create the two datasets."""
    client.datasets.create(builtin="digits")
    client.datasets.upload(flats(), name="flats", reuse=True)


def run(client: gh.Client, name: str) -> tuple[Job, Job]:
    """Train with the problem and without it."""
    problem, fix = (
        client.jobs.create({"kind": "train", "name": f"{name}: {kind}", **spec})
        for kind, spec in zip(("problem", "fix"), CASES[name].specs, strict=True)
    )
    return problem.wait(), fix.wait()


def table(problem: Figures, fix: Figures) -> str:
    """The figures of both runs, to three digits."""
    rows = [f"| {name} | {value:.3g} | {fix[name]:.3g} |" for name, value in problem.items()]
    return "\n".join(["| | problem | fix |", "|---|---|---|", *rows])


def store(picture: bytes, path: Path) -> None:
    """Store a PNG with few colors, which takes a third of the space."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(48, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; all without any")
    parser.add_argument("--pictures", type=Path, help="a folder for a picture of each run")
    parser.add_argument("--service", action="store_true", help="use the running service")
    options = parser.parse_args()
    with gh.Client() if options.service else gh.Client("inproc://") as client:
        prepare(client)
        for name in options.names or CASES:
            jobs = run(client, name)
            print(f"\n{name}\n")
            print(table(*(CASES[name].figures(job) for job in jobs)), flush=True)
            if options.pictures:
                options.pictures.mkdir(parents=True, exist_ok=True)
                for kind, job in zip(("problem", "fix"), jobs, strict=True):
                    store(
                        job.plot(**CASES[name].plot),
                        options.pictures / f"gallery-{name}-{kind}.png",
                    )


if __name__ == "__main__":
    main()
