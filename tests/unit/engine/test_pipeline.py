"""Pipelines of stages in several processes, against one process that has all layers."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.unit.engine.parallel_jobs import (
    ADAM,
    ALL_KINDS,
    OF_PARAMETERS,
    SMOOTH,
    VALIDATION,
    VARIANTS,
    assert_resumes,
    assert_same_losses,
    network,
    of_tokens,
    pair,
    rarely,
    series,
    table_of,
    token_table,
    weights,
)
from tests.unit.engine.processes import finish, run_processes, start
from tests.unit.engine.ragged import write_ragged
from tests.unit.engine.runs import captured, losses, of_type, run

pytestmark = pytest.mark.long


DATA_AND_PIPELINE = {"data": 2, "pipeline": 2}
DEEP = [
    SMOOTH[0],
    SMOOTH[1],
    SMOOTH[2],
    SMOOTH[3],
    {"name": "fc1", "type": "Linear", "args": {"out_features": 24}},
    {"name": "act", "type": "GELU"},
    {"name": "fc2", "type": "Linear", "args": {"out_features": 12}},
    {"name": "norm", "type": "LayerNorm"},
    {"name": "skip", "type": "cat", "inputs": ["norm", "act"], "args": {"dim": 1}},
    SMOOTH[4],
]


def staged(layers: Sequence[dict[str, Any]], *firsts: str) -> dict[str, Any]:
    """A network whose stages begin with some layers."""
    made = network(*layers)
    for number, name in enumerate(firsts):
        next(item for item in made["layers"] if item["name"] == name)["stage"] = number + 1
    return made


def pipelined(
    num: int, how: dict[str, Any], rows: int = 64, **more: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A job of a pipeline, and the same job of one process."""
    sizes = {name: how[name] for name in ("data", "fsdp", "pipeline") if name in how}
    several, alone = map(copy.deepcopy, pair(num, rows, sizes, **more))
    several["data"]["batch_size"] = rows // (how.get("data", 1) * how.get("fsdp", 1))
    several["parallel"] |= how
    for layer in alone["network"].get("layers", ()):
        layer.pop("stage", None)
    return several, alone


HOW: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "gpipe": (2, {"pipeline": 2, "schedule": "gpipe", "micro_batches": 4}, ("fc1",)),
    "1f1b": (2, {"pipeline": 2, "micro_batches": 4}, ("fc1",)),
    "interleaved": (
        2,
        {"pipeline": 2, "schedule": "interleaved", "micro_batches": 4},
        ("pool1", "act", "norm"),
    ),
    "data and pipeline": (4, {"data": 2, "pipeline": 2, "micro_batches": 4}, ("fc1",)),
    "fsdp and pipeline": (4, {"fsdp": 2, "pipeline": 2, "micro_batches": 4}, ("fc1",)),
    "fsdp and interleaved": (
        4,
        {"fsdp": 2, "pipeline": 2, "schedule": "interleaved", "micro_batches": 4},
        ("pool1", "act", "norm"),
    ),
    "all three": (8, {"data": 2, "fsdp": 2, "pipeline": 2, "micro_batches": 2}, ("fc1",)),
}
SLOW = ("fsdp and interleaved", "all three")


def in_one_piece(how: dict[str, Any]) -> dict[str, Any]:
    """The batch of each of two pipelines as one micro-batch: one process has none of their own."""
    if {"data", "fsdp"}.isdisjoint(how):
        return how
    return {**how, "schedule": "gpipe", "micro_batches": 1}


@pytest.mark.parametrize("name", [rarely(x) if x in SLOW else x for x in HOW])
def test_the_losses_are_those_of_one_process(name, server, digits, tmp_path):
    num, how, firsts = HOW[name]
    more: dict[str, Any] = {"optimizer": ADAM, "stop": {"steps": 100}}
    more["network"] = staged(DEEP, *firsts)
    more["metrics"] = [{"type": "accuracy", "inputs": ["fc", "label"]}]
    several, alone = pipelined(num, how, data=VALIDATION, **more)
    found = run_processes(server, tmp_path / "a", several, digits)
    assert_same_losses(found, run(tmp_path / "b", alone, digits))


@pytest.mark.parametrize(
    "name",
    [
        "interleaved",
        "data and pipeline",
        "fsdp and pipeline",
        *map(rarely, ("gpipe", "1f1b")),
    ],
)
def test_what_probes_see_is_what_they_see_of_one_process(name, server, digits, tmp_path):
    num, how, firsts = HOW[name]
    want = ["stats", "full", "histogram"]
    probes = [
        {"layers": ["*"], "kinds": ALL_KINDS, "want": want, "every": 1},
        {"layers": ["*"], "kinds": ["output"], "phase": "evaluate", "every": 1},
        {"layers": ["loss*"], "kinds": ["output"], "want": want, "every": 1},
    ]
    momentum = {"type": "SGD", "args": {"lr": 0.05, "momentum": 0.9}}
    more: dict[str, Any] = {"probes": probes, "stop": {"steps": 3}, "optimizer": momentum}
    more["network"] = staged(DEEP, *firsts)
    how = in_one_piece(how)
    several, alone = pipelined(num, how, data=VALIDATION, **more)
    alone["accumulate"] = how["micro_batches"]
    alone["data"]["batch_size"] = 64 // how["micro_batches"]
    mine = run_processes(server, tmp_path / "a", several, digits)
    theirs = run(tmp_path / "b", alone, digits)
    assert losses(mine) == pytest.approx(losses(theirs), rel=1e-6)
    for item in of_type(mine, "stats"):  # of one micro-batch
        names = [tuple(row[:2]) for row in item["rows"]]
        assert len(names) == len({*names})
    found, expected = table_of(mine), table_of(theirs)
    evaluated = [key for key in expected if key[1] == "evaluate"]
    assert evaluated
    for key in evaluated:  # of the first batch, which has other rows
        del expected[key], found[key]
    assert [*found] == [*expected]
    for key, values in expected.items():
        *figures, zeros, _, _ = zip(found[key], values, strict=True)
        for mine_of, theirs_of in figures:
            assert mine_of == pytest.approx(theirs_of, rel=2e-3, abs=2e-5), key
        assert zeros[0] == pytest.approx(zeros[1], abs=0.05), key
    whole, theirs_whole = captured(mine, tmp_path / "a"), captured(theirs, tmp_path / "b")
    assert whole.keys() == theirs_whole.keys()
    for key, tensor in theirs_whole.items():
        torch.testing.assert_close(whole[key], tensor, rtol=2e-3, atol=2e-5, msg=str(key))


CHANGES: dict[str, dict[str, Any]] = {
    **OF_PARAMETERS,
    **{name: item for name, item in VARIANTS.items() if name not in ("sgd", "adam")},
    "global batch": {"data": {"global_batch_size": 64}, "stop": {"steps": 20}},
    "frozen": {"stop": {"steps": 20}},
    "bfloat16": {"precision": "bfloat16", "stop": {"steps": 20}},
    "metrics": {
        "metrics": [
            {"type": "accuracy", "inputs": ["fc", "label"], "every": 2},
            {
                "type": "MulticlassConfusionMatrix",
                "inputs": ["fc", "label"],
                "args": {"num_classes": 10},
            },
            {"type": "MulticlassF1Score", "inputs": ["fc", "label"], "args": {"num_classes": 10}},
            {"type": "mean", "inputs": ["act"], "name": "a", "every": 1},
            {"type": "l2_ratio", "inputs": ["conv1", "fc"], "name": "b", "every": 2},
            {"type": "mean", "inputs": ["gelu1/output_grad"], "name": "c", "every": 2},
        ],
        "evaluate": {"every_steps": 2, "samples": 7},
        "stop": {"steps": 4},  # the last batch of an epoch is divided in another way
    },
    "of a stage": {
        "loss": [
            {"type": "CrossEntropyLoss", "inputs": ["fc", "label"], "name": "a"},
            {"type": "CrossEntropyLoss", "inputs": ["fc2", "label"], "weight": 0.5, "name": "b"},
        ],
        "stop": {"steps": 20},
    },
    "options of layers": {"stop": {"steps": 20}},
}
OF_LAYERS: dict[str, dict[str, dict[str, Any]]] = {
    "frozen": {"conv1": {"trainable": False}},
    "options of layers": {
        "conv1": {"lr_scale": 0.5, "init": {"weight": {"type": "normal_", "args": {"std": 0.1}}}},
        "fc1": {"grad_clip": {"type": "global_norm", "max": 0.05}, "weight_decay": 0.01},
        "fc": {"output_grad_clip": 0.001, "l1": 0.001},
    },
}


OFTEN = (
    *("guards", "clipping", "accumulation", "ema", "metrics", "of a stage", "options of layers"),
    *("activation checkpointing", "frozen", "bfloat16", "global batch"),
)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "1f1b") for name in OFTEN),
        *(rarely(name, "1f1b") for name in CHANGES if name not in OFTEN),
        *(rarely(name, "interleaved") for name in CHANGES),
        ("clip by norm", "fsdp and pipeline"),
        *(rarely(name, "fsdp and pipeline") for name in CHANGES if name != "clip by norm"),
    ],
    ids=str,
)
def test_settings_have_the_effect_of_one_process(name, how, server, digits, tmp_path):
    num, sizes, firsts = HOW[how]
    sizes = in_one_piece(sizes) if name == "metrics" else sizes
    more = copy.deepcopy({"network": staged(DEEP, *firsts), **CHANGES[name]})
    for layer in more["network"]["layers"]:
        layer.update(OF_LAYERS.get(name, {}).get(layer["name"], {}))
    data = {**VALIDATION, **more.pop("data", {})}
    several, alone = pipelined(num, sizes, data=data, **more)
    if name == "metrics":  # they are those of the last micro-batch, as with accumulation
        number = several["parallel"]["micro_batches"]
        alone["accumulate"], alone["data"]["batch_size"] = number, 64 // number
    if "global_batch_size" in data:
        del several["data"]["batch_size"], alone["data"]["batch_size"]
    found = run_processes(server, tmp_path / "a", several, digits)
    expected = run(tmp_path / "b", alone, digits)
    assert_same_losses(found, expected, rel=2e-3 if name == "bfloat16" else 1e-5)
    for mine, theirs in zip(series(found), series(expected), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-2 if name == "bfloat16" else 1e-3, abs=1e-6)
    for path in (tmp_path / "b/artifacts").glob("*.safetensors"):
        both = (load_file(tmp_path / "a/artifacts" / path.name), load_file(path))
        assert both[0].keys() == both[1].keys()
        for key, tensor in both[1].items():
            torch.testing.assert_close(both[0][key], tensor, rtol=1e-3, atol=1e-5)


STRATEGIES: dict[str, tuple[int, str | dict[str, Any]]] = {
    "one": (1, {}),
    "data": (2, "data"),
    "fsdp": (2, "fsdp"),
    "tensor": (2, "tensor"),
    "1f1b": (2, HOW["1f1b"][1]),
    "interleaved": (2, HOW["interleaved"][1]),
    "data and pipeline": (4, HOW["data and pipeline"][1]),
    "fsdp and pipeline": (4, HOW["fsdp and pipeline"][1]),
    "fsdp and interleaved": (4, HOW["fsdp and interleaved"][1]),
}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("1f1b", "1f1b"),
        ("interleaved", "data and pipeline"),
        ("one", "interleaved"),
        rarely("1f1b", "one"),
        rarely("fsdp", "1f1b"),
        ("fsdp and pipeline", "fsdp and pipeline"),
        *(rarely("data and pipeline", name) for name in STRATEGIES),
        *(rarely("fsdp and pipeline", name) for name in STRATEGIES if name[:5] != "fsdp and p"),
        *(rarely(name, "fsdp and interleaved") for name in ("fsdp", "one")),
        *(rarely(name, "1f1b") for name in ("data", "tensor")),
    ],
    ids=str,
)
def test_a_pipeline_resumes_and_is_resumed(first, second, server, digits, tmp_path):
    def at(directory, is_second, **more: Any):
        name = second if is_second else first
        num, how = STRATEGIES[name]
        job: dict[str, Any] = {
            "network": staged(DEEP, *HOW[name][2]) if name in HOW else network(*DEEP),
            "optimizer": ADAM,
            "average": {"type": "ema", "decay": 0.9},
            "grad_clip": {"type": "global_norm", "max": 0.5},
            "checkpoint": {"every_steps": 7},
            "stop": {"steps": 20},
        }
        if name == "one":
            return run(directory, pair(2, 64, "data", **job)[1], digits, **more)
        is_staged = isinstance(how, dict)
        several = pipelined(num, how, **job)[0] if is_staged else pair(num, 64, how, **job)[0]
        return run_processes(server, directory, several, digits, **more)

    assert_resumes(at, tmp_path, is_alike=first == second)


def test_a_transformer_in_stages_by_the_plan_learns_as_in_one_process(server, tmp_path):
    table = token_table(tmp_path / "t")
    how = {"data": 2, "pipeline": 2, "micro_batches": 4}
    several, alone = pipelined(4, how, **of_tokens("transformer"), stop={"steps": 100})
    found = run_processes(server, tmp_path / "a", several, table)
    assert_same_losses(found, run(tmp_path / "b", alone, table))


@pytest.mark.parametrize("how", ["1f1b", rarely("interleaved")])
def test_a_pipeline_runs_in_smaller_parts_if_memory_was_too_small(how, server, digits, tmp_path):
    """As ``guards.memory`` restarts a job: with twice as many micro-batches."""
    num, sizes, firsts = HOW[how]
    several, alone = pipelined(num, sizes, network=staged(DEEP, *firsts), stop={"steps": 20})
    found = run_processes(server, tmp_path / "a", several, digits, parts=2)
    expected = run(tmp_path / "b", alone, digits)
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    (told,) = [one for one in of_type(found, "adjusted") if one["what"] == "batch_size"]
    assert (told["from"], told["to"]) == (16, 8)


@pytest.mark.parametrize(
    ("how", "shards"),
    [
        ("1f1b", 1),
        ("interleaved", 1),
        ("1f1b", 2),
        rarely("gpipe", 1),
        rarely("interleaved", 2),
    ],
)
def test_batches_of_any_size_and_rows_of_any_length(how, shards, server, tmp_path):
    """The last batch has other sizes, and micro-batches differ in their longest rows.

    Of two pipelines, also in how many micro-batches of one shape follow each other.
    """
    generator = np.random.default_rng(1)
    table = write_ragged(
        tmp_path / "t",
        [
            {
                "tok": generator.integers(0, 50, generator.integers(1, 7)).tolist(),
                "label": int(generator.integers(0, 10)),
            }
            for _ in range(90)
        ],
    )
    layers = [
        {"name": "emb", "type": "Embedding", "inputs": ["tok"], "args": {"embedding_dim": 8}},
        {"name": "lstm", "type": "LSTM", "args": {"hidden_size": 8, "batch_first": True}},
        {"name": "act", "type": "GELU"},
        {"name": "pool", "type": "SequencePool", "args": {"mode": "average"}},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    firsts = ("lstm", "act", "pool") if how == "interleaved" else ("act",)
    parts = of_tokens("transformer") | {"network": staged(layers, *firsts), "stop": {"epochs": 6}}
    sizes = {"pipeline": 2, "schedule": how, "micro_batches": 4}
    sizes |= {"fsdp": shards} if shards > 1 else {}
    parts["data"]["train"] = {"dataset": "ds_1"}
    several, alone = pipelined(2 * shards, sizes, 32, **parts)
    found = run_processes(server, tmp_path / "a", several, table)
    assert_same_losses(found, run(tmp_path / "b", alone, table))


FAILING: dict[str, list[dict[str, Any]]] = {
    "forward": [{"name": "bad", "type": "log", "inputs": ["fc1"]}],
    "backward": [
        {"name": "zero", "type": "mul", "inputs": ["fc1"], "args": {"other": 0.0}},
        {"name": "bad", "type": "sqrt", "inputs": ["zero"]},
    ],
}


@pytest.mark.parametrize(
    ("how", "phase"),
    [
        ("1f1b", "backward"),
        ("interleaved", "forward"),
        rarely("1f1b", "forward"),
        rarely("interleaved", "backward"),
        *(rarely("fsdp and pipeline", phase) for phase in FAILING),
    ],
)
def test_the_first_layer_that_is_not_finite_is_found(phase, how, server, digits, tmp_path):
    """A later or an earlier stage has NaN too: it follows from the layer's."""
    layers = [*DEEP[:5], *FAILING[phase], *DEEP[5:]]
    layers = [{**item, "inputs": ["bad"]} if item["name"] == "act" else item for item in layers]
    num, sizes = HOW[how][0], in_one_piece(HOW[how][1])
    firsts = ("pool1", FAILING[phase][0]["name"], "fc2") if how == "interleaved" else ("fc1",)
    guards = {"nonfinite": {"action": "fail"}}
    several, alone = pipelined(num, sizes, network=staged(layers, *firsts), guards=guards)
    number = sizes["micro_batches"]
    alone["accumulate"], alone["data"]["batch_size"] = number, 64 // number
    mine = finish(start(server, tmp_path / "a", several, digits), tmp_path / "a")[0]
    theirs = finish(start(server, tmp_path / "b", alone, digits), tmp_path / "b")[0]
    found, expected = (of_type(records, "finding")[0] for records in (mine, theirs))
    assert expected["phase"] == phase
    for key in ("layer", "tensor", "kind", "phase", "samples", "bad_samples", "checks"):
        assert found[key] == expected[key], key
    if num == 2:  # else it counts the values of one of the pipelines
        assert found["message"] == expected["message"]
    assert mine[-1]["error"]["code"] == theirs[-1]["error"]["code"]


def test_probes_see_each_process(server, digits, tmp_path):
    """Of two pipelines: each has its own rows, and one process of it has the layer."""
    num, how, firsts = HOW["data and pipeline"]
    probe = {"layers": ["fc1", "conv1"], "kinds": ["output", "param_grad"], "every": 1}
    probes = [{**probe, "want": ["stats", "full", "histogram"], "ranks": "all"}]
    job: dict[str, Any] = {"network": staged(DEEP, *firsts), "stop": {"steps": 2}}
    several, _ = pipelined(num, how, probes=probes, **job)
    records = run_processes(server, tmp_path, several, digits)
    for item in of_type(records, "stats"):
        seen = {(one["rank"], row[0], row[1]) for one in item["ranks"] for row in one["rows"]}
        stages = ((0, "conv1"), (1, "fc1"))
        assert seen == {
            (place + first, name, kind)
            for first in (0, 2)
            for place, layer in stages
            for name, kind in (
                (layer, "output"),
                (f"{layer}.weight", "param_grad"),
                (f"{layer}.bias", "param_grad"),
            )
        }
        merged = {(row[0], row[1]): row[2] for row in item["rows"]}
        means = {
            (one["rank"], row[0]): row[2]
            for one in item["ranks"]
            for row in one["rows"]
            if row[1] == "output"
        }
        for place, layer in stages:
            mean = (means[place, layer] + means[place + 2, layer]) / 2
            assert merged[layer, "output"] == pytest.approx(mean, rel=1e-6)


TIED = [
    {
        "name": "wte",
        "type": "TiedEmbedding",
        "inputs": ["tok"],
        "args": {"num_embeddings": 50, "embedding_dim": 8, "std": 0.3},
    },
    {"name": "pool", "type": "SequencePool", "args": {"mode": "average"}},
    {"name": "mid", "type": "Linear", "args": {"out_features": 8}},
    {"name": "fc", "shared_with": "wte"},
]


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("data and pipeline", "averages and clipping"),
        ("fsdp and pipeline", "averages and clipping"),
        ("1f1b", "plain"),
        rarely("fsdp and interleaved", "plain"),
        rarely("1f1b", "averages and clipping"),
        *(rarely("interleaved", name) for name in ("plain", "averages and clipping")),
        *(rarely("gpipe", name) for name in ("plain", "averages and clipping")),
    ],
)
def test_layers_of_several_stages_share_parameters(how, name, server, tmp_path):
    """As both ends of tied embeddings."""
    more: dict[str, Any] = {}
    if name != "plain":
        more = {
            "average": {"type": "ema", "decay": 0.9},
            "grad_clip": {"type": "norm", "max": 0.01},
        }
    num, sizes, _ = HOW[how]
    table = token_table(tmp_path / "t")
    firsts = ("pool", "mid", "fc") if how.endswith("interleaved") else ("mid",)
    parts = of_tokens("transformer") | {"network": staged(TIED, *firsts), "stop": {"steps": 30}}
    parts["data"]["validation"] = {"dataset": "ds_1", "split": "train"}
    kinds = ["param", "param_grad", "update"]
    parts["probes"] = [{"layers": ["*"], "kinds": kinds, "want": ["stats"], "every": 10}]
    several, alone = pipelined(num, sizes, **parts, **more)
    mine = run_processes(server, tmp_path / "a", several, table)
    theirs = run(tmp_path / "b", alone, table)
    assert_same_losses(mine, theirs)
    found, expected = table_of(mine), table_of(theirs)
    assert [*found] == [*expected]
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-3, abs=1e-6), key
    saved, theirs_saved = weights(tmp_path / "a", 30), weights(tmp_path / "b", 30)
    assert saved.keys() == theirs_saved.keys()
    for key, tensor in theirs_saved.items():
        torch.testing.assert_close(saved[key], tensor, rtol=1e-4, atol=1e-6)


def test_dropout_depends_on_no_schedule(server, digits, tmp_path):
    """Nor on where the job was resumed: on seed, step, rows, micro-batch and stage only."""
    layers = [*DEEP[:6], {"name": "drop", "type": "Dropout", "args": {"p": 0.5}}, *DEEP[6:]]
    job: dict[str, Any] = {"network": staged(layers, "fc1"), "stop": {"steps": 12}}
    job["checkpoint"] = {"every_steps": 5}
    found: dict[str, list[float]] = {}
    for how in ("gpipe", "1f1b"):
        several, _ = pipelined(2, HOW[how][1], **job)
        found[how] = losses(run_processes(server, tmp_path / how, several, digits))
    assert found["gpipe"] == found["1f1b"]
    several, without = pipelined(2, HOW["1f1b"][1], **job)
    without["network"] = network(*DEEP)
    assert losses(run(tmp_path / "without", without, digits))[0] != found["1f1b"][0]
    resume = {"dir": str(tmp_path / "1f1b/checkpoints/step-5"), "step": 5}
    rest = run_processes(server, tmp_path / "rest", several, digits, resume=resume)
    assert losses(rest) == found["1f1b"][5:]
