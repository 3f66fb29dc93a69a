"""Layers that processes divide among themselves, against one process that has them whole."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.metrics.metrics import wanted
from engine.network.network import Network
from engine.network.tensor_plan import tensor_plan
from glasshouse.spec import TrainJob, parse_job
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
)
from tests.unit.engine.processes import finish, run_processes, start
from tests.unit.engine.runs import captured, errors, losses, planned, run

pytestmark = pytest.mark.long


DATA_AND_TENSOR = {"data": 2, "tensor": 2}
FSDP_AND_TENSOR = {"fsdp": 2, "tensor": 2}
MLP = [
    {"name": "flat", "type": "Flatten"},
    {"name": "fc1", "type": "Linear", "args": {"out_features": 24}},
    {"name": "act", "type": "GELU"},
    {"name": "fc2", "type": "Linear", "args": {"out_features": 12}},
    {"name": "norm", "type": "LayerNorm"},
    SMOOTH[4],
]


EMBEDDED = {"name": "emb", "type": "Embedding", "inputs": ["tok"], "args": {"embedding_dim": 8}}
BLOCK = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
NETWORKS: dict[str, list[dict[str, Any]]] = {
    "queries, keys and values of their own": [
        EMBEDDED,
        *(
            {"name": part, "type": "Linear", "inputs": ["emb"], "args": {"out_features": 8}}
            for part in "qkv"
        ),
        {
            "name": "attention",
            "type": "DotProductAttention",
            "inputs": [*"qkv"],
            "args": {"num_heads": 4, "is_causal": True},
        },
        {"name": "out", "type": "Linear", "args": {"out_features": 8, "bias": False}},
        {"name": "pool", "type": "SequencePool", "args": {"mode": "average"}},
        SMOOTH[4],
    ],
    "a gate": [
        EMBEDDED,
        {"name": "up", "type": "Linear", "inputs": ["emb"], "args": {"out_features": 12}},
        {"name": "gate", "type": "Linear", "inputs": ["emb"], "args": {"out_features": 12}},
        {"name": "silu", "type": "SiLU", "args": {"inplace": True}},
        {"name": "half", "type": "mul", "inputs": ["up", "silu"]},  # also a method of modules
        {"name": "to", "type": "Linear", "args": {"out_features": 8}},
        {"name": "pool", "type": "SequencePool", "args": {"mode": "average"}},
        SMOOTH[4],
    ],
    "an encoder layer": [
        EMBEDDED,
        {"name": "enc", "type": "TransformerEncoderLayer", "args": BLOCK},
        {"name": "pool", "type": "SequencePool", "args": {"mode": "average"}},
        SMOOTH[4],
    ],
    "a decoder layer": [
        EMBEDDED,
        {
            "name": "dec",
            "type": "TransformerDecoderLayer",
            "inputs": ["emb", "emb"],
            "args": BLOCK,
        },
        {"name": "pool", "type": "SequencePool", "args": {"mode": "average"}},
        SMOOTH[4],
    ],
    "a tied embedding": [
        {
            "name": "wte",
            "type": "TiedEmbedding",
            "inputs": ["tok"],
            "args": {"num_embeddings": 50, "embedding_dim": 8, "std": 0.3},
        },
        {"name": "pool", "type": "SequencePool", "args": {"mode": "average"}},
        {"name": "fc", "shared_with": "wte"},
    ],
}
DIVIDED = {
    "queries, keys and values of their own": ["emb", "fc", "k", "out", "q", "v"],
    "a gate": ["emb", "fc", "gate", "to", "up"],
    "a decoder layer": ["dec.linear1", "dec.linear2", "emb", "fc"],
    "an encoder layer": ["emb", "enc.linear1", "enc.linear2", "fc"],
    "a tied embedding": ["wte"],
}


@pytest.mark.parametrize(
    ("num", "strategy", "layers"),
    [
        (2, "tensor", MLP),
        (4, FSDP_AND_TENSOR, SMOOTH),
        *(rarely(4, both, MLP) for both in (DATA_AND_TENSOR, FSDP_AND_TENSOR)),
        *(rarely(*both, SMOOTH) for both in ((2, "tensor"), (4, DATA_AND_TENSOR))),
    ],
    ids=["tensor mlp", "both cnn", "data mlp", "both mlp", "tensor cnn", "data cnn"],
)
def test_the_losses_are_those_of_one_process(num, strategy, layers, server, digits, tmp_path):
    more: dict[str, Any] = {"network": network(*layers), "optimizer": ADAM, "stop": {"steps": 100}}
    more["metrics"] = [{"type": "accuracy", "inputs": ["fc", "label"]}]
    several, alone = pair(num, 64, strategy, data=VALIDATION, **more)
    found = run_processes(server, tmp_path / "a", several, digits)
    expected = run(tmp_path / "b", alone, digits)
    assert_same_losses(found, expected)


@pytest.mark.parametrize(
    ("num", "strategy"),
    [(2, "tensor"), (4, DATA_AND_TENSOR), rarely(4, FSDP_AND_TENSOR)],
    ids=str,
)
def test_a_transformer_learns_as_in_one_process(num, strategy, server, tmp_path):
    table = token_table(tmp_path / "t")
    several, alone = pair(num, 64, strategy, **of_tokens("transformer"), stop={"steps": 100})
    found = run_processes(server, tmp_path / "a", several, table)
    assert_same_losses(found, run(tmp_path / "b", alone, table))


@pytest.mark.parametrize(
    ("name", "num", "strategy"),
    [
        ("mlp", 4, DATA_AND_TENSOR),
        ("transformer", 2, "tensor"),
        ("transformer", 4, FSDP_AND_TENSOR),
        rarely("mlp", 2, "tensor"),
        rarely("mlp", 4, FSDP_AND_TENSOR),
        rarely("transformer", 4, DATA_AND_TENSOR),
    ],
    ids=str,
)
def test_what_probes_see_is_what_they_see_of_one_process(
    name, num, strategy, server, digits, tmp_path
):
    want = ["stats", "full", "histogram"]
    probes = [
        {"layers": ["*"], "kinds": ALL_KINDS, "want": want, "every": 1},
        {"layers": ["*"], "kinds": ["output"], "phase": "evaluate", "every": 1},
    ]
    # Adam would turn the gradient of the keys' bias, which is rounding alone, into large updates
    momentum = {"type": "SGD", "args": {"lr": 0.05, "momentum": 0.9}}
    more: dict[str, Any] = {"probes": probes, "stop": {"steps": 3}, "optimizer": momentum}
    if name == "mlp":
        table, job = digits, {"network": network(*MLP), "data": VALIDATION}
    else:
        table, job = token_table(tmp_path / "t"), of_tokens("transformer")
        del probes[1:]  # the table has no rows to evaluate
    several, alone = pair(num, 60, strategy, **job | more)
    mine = run_processes(server, tmp_path / "a", several, table)
    theirs = run(tmp_path / "b", alone, table)
    found, expected = table_of(mine), table_of(theirs)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        *figures, zeros, _, _ = zip(found[key], values, strict=True)
        for mine_of, theirs_of in figures:
            assert mine_of == pytest.approx(theirs_of, rel=2e-3, abs=2e-5), key
        assert zeros[0] == pytest.approx(zeros[1], abs=0.05), key  # of that bias's gradient
    whole, theirs_whole = captured(mine, tmp_path / "a"), captured(theirs, tmp_path / "b")
    assert whole.keys() == theirs_whole.keys()
    for key, tensor in theirs_whole.items():
        torch.testing.assert_close(whole[key], tensor, rtol=2e-3, atol=2e-5, msg=str(key))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    ("num", "strategy"),
    [(2, "tensor"), rarely(4, FSDP_AND_TENSOR)],
    ids=str,
)
def test_networks_learn_as_in_one_process(name, num, strategy, server, tmp_path):
    table, parts = token_table(tmp_path / "t"), of_tokens("transformer")
    several, alone = pair(num, 64, strategy, **parts | {"network": network(*NETWORKS[name])})
    plan = planned(several, json.loads((table / "meta.json").read_text()))
    assert plan["parallel"]["divided"] == DIVIDED[name]
    found = run_processes(server, tmp_path / "a", several, table)
    assert_same_losses(found, run(tmp_path / "b", alone, table))


def test_a_block_of_a_transformer_is_divided_without_a_gap(tmp_path):
    """The attention by heads, between its projections: nothing is put together inside of it."""
    table = token_table(tmp_path)
    several, _ = pair(2, 64, "tensor", **of_tokens("transformer"))
    resolved = planned(several, json.loads((table / "meta.json").read_text()))["spec"]
    job = parse_job(json.dumps(resolved))
    assert isinstance(job, TrainJob)
    layers = Network(job.network, wanted(job)).layers
    plan = tensor_plan(job.network, layers, wanted(job), 2)
    blocks = ("block0", "block1")
    assert plan.columns == {
        f"{block}_{name}": parts for block in blocks for name, parts in (("c_attn", 3), ("c_fc", 1))
    }
    assert plan.rows == [f"{block}_{name}" for block in blocks for name in ("attn_proj", "c_proj")]
    assert plan.heads == [f"{block}_attn" for block in blocks]
    assert plan.gathered == ["embedding", "fc"]


CHANGES: dict[str, dict[str, Any]] = {
    **OF_PARAMETERS,
    **{name: VARIANTS[name] for name in ("clipping", "accumulation", "ema", "sum", "two losses")},
    "activation checkpointing": {
        "activation_checkpointing": ["fc1", "norm", "fc"],
        "stop": {"steps": 20},
    },
    "global batch": {"data": {"global_batch_size": 64}, "stop": {"steps": 20}},
    "metrics": {
        "metrics": [
            {"type": "mean", "inputs": ["act"], "name": "of_part", "every": 1},
            {"type": "l2_ratio", "inputs": ["fc1.weight/update", "fc1.weight/param"]},
            {
                "type": "MulticlassConfusionMatrix",
                "inputs": ["fc", "label"],
                "args": {"num_classes": 10},
            },
        ],
        "stop": {"steps": 10},
    },
}


OFTEN = (
    *("guards", "clipping", "accumulation", "ema"),
    *("activation checkpointing", "metrics", "global batch"),
)


@pytest.mark.parametrize(
    ("name", "num", "strategy"),
    [
        *((name, 2, "tensor") for name in OFTEN),
        *(rarely(name, 2, "tensor") for name in CHANGES if name not in OFTEN),
        *(rarely(name, 4, FSDP_AND_TENSOR) for name in CHANGES),
    ],
    ids=str,
)
def test_settings_have_the_effect_of_one_process(name, num, strategy, server, digits, tmp_path):
    more = copy.deepcopy({"network": network(*MLP), **CHANGES[name]})
    data = {**VALIDATION, **more.pop("data", {})}
    several, alone = pair(num, 64, strategy, data=data, **more)
    if "global_batch_size" in data:
        del several["data"]["batch_size"], alone["data"]["batch_size"]
    found = run_processes(server, tmp_path / "a", several, digits)
    expected = run(tmp_path / "b", alone, digits)
    assert_same_losses(found, expected)
    both = zip(series(found), series(expected), strict=True)
    for mine, theirs in both:
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-6)


def test_batch_normalization_over_all_rows_counts_each_row_once(server, digits, tmp_path):
    """Two processes have each row: neither the mean nor the unbiased variance may see it twice."""
    layers = [*MLP[:4], {"name": "norm", "type": "SyncBatchNorm"}, MLP[5]]
    several, alone = pair(
        4, 8, DATA_AND_TENSOR, network=network(*layers), data=VALIDATION, stop={"steps": 20}
    )
    found = run_processes(server, tmp_path / "a", several, digits)
    assert_same_losses(found, run(tmp_path / "b", alone, digits), rel=1e-4)


def test_a_value_that_is_not_finite_is_found_in_a_divided_layer(server, digits, tmp_path):
    """An exploding job fails with the cause and the rows of one process, each row once."""
    more: dict[str, Any] = {"network": network(*MLP), "guards": {"nonfinite": {"action": "fail"}}}
    more["optimizer"] = {"type": "SGD", "args": {"lr": 1e18}}
    several, alone = pair(2, 64, "tensor", **more)
    alone["parallel"] = {"processes": 1}

    def error_of(directory: Path, job: dict[str, Any]) -> dict[str, Any]:
        return finish(start(server, directory, job, digits), directory)[0][-1]["error"]

    mine, theirs = error_of(tmp_path / "a", several), error_of(tmp_path / "b", alone)
    assert (mine["code"], mine["layer"], mine["step"]) == ("non_finite", "fc2", 1)
    for name in ("samples", "num_samples", "bad_samples", "kind", "phase", "metric"):
        assert mine["nonfinite"][name] == theirs["nonfinite"][name], name


def test_bfloat16_learns_as_in_one_process(server, digits, tmp_path):
    more: dict[str, Any] = {"network": network(*MLP), "precision": "bfloat16"}
    several, alone = pair(2, 64, "tensor", data=VALIDATION, stop={"steps": 20}, **more)
    found = run_processes(server, tmp_path / "a", several, digits)
    expected = run(tmp_path / "b", alone, digits)
    assert losses(found) == pytest.approx(losses(expected), rel=1e-2)


KINDS: dict[str, tuple[int, Any]] = {
    "one": (1, "data"),
    "data": (2, "data"),
    "fsdp": (2, "fsdp"),
    "tensor": (2, "tensor"),
    "both": (4, FSDP_AND_TENSOR),
}


RESUMES = [("tensor", "tensor"), ("fsdp", "tensor"), ("both", "data"), ("both", "both")]
OTHER_RESUMES = [
    both
    for both in itertools.product(KINDS, KINDS)
    if both not in RESUMES and not {"tensor", "both"}.isdisjoint(both)
]


@pytest.mark.parametrize(
    ("first", "second"), [*RESUMES, *(rarely(*both) for both in OTHER_RESUMES)]
)
def test_a_job_resumes_under_another_strategy(first, second, server, digits, tmp_path):
    """Bit for bit under the same one, dropout included; else up to rounding."""
    drop = [{"name": "drop", "type": "Dropout", "args": {"p": 0.25}}] * (first == second)
    layers = [*MLP[:3], *drop, *MLP[3:]]
    more: dict[str, Any] = {"network": network(*layers), "optimizer": ADAM, "stop": {"steps": 20}}
    more |= {"checkpoint": {"every_steps": 7}, "average": {"type": "ema", "decay": 0.9}}

    def at(directory: Path, is_second: bool, **more_of_run: Any) -> list[dict[str, Any]]:
        num, strategy = KINDS[second if is_second else first]
        several, alone = pair(num, 64, strategy, **copy.deepcopy(more))
        if num == 1:
            return run(directory, alone, digits, **more_of_run)
        return run_processes(server, directory, several, digits, **more_of_run)

    assert_resumes(at, tmp_path, is_alike=first == second)


def test_each_process_draws_its_own_dropout_for_its_part(server, digits, tmp_path):
    """And the same for a layer that all processes have whole."""
    drop = [{"name": name, "type": "Dropout", "args": {"p": 0.5}} for name in ("first", "second")]
    layers = [*MLP[:3], drop[0], *MLP[3:5], drop[1], MLP[5]]
    probe = {"layers": ["first", "second"], "kinds": ["output"], "want": ["full"], "every": 1}
    several, _ = pair(2, 64, "tensor", network=network(*layers), probes=[probe], stop={"steps": 2})
    records = run_processes(server, tmp_path / "a", several, digits)
    found = {key[1]: tensor for key, tensor in captured(records, tmp_path / "a").items()}
    parts = (found["first"] == 0).chunk(2, dim=1)
    assert 0.4 < float(parts[0].double().mean()) < 0.6
    assert 0.35 < float((parts[0] == parts[1]).double().mean()) < 0.65
    assert 0.4 < float((found["second"] == 0).double().mean()) < 0.6
    assert len(losses(records)) == 2


def test_the_plan_says_which_layers_are_divided_and_what_that_takes():
    several, alone = pair(4, 64, DATA_AND_TENSOR, network=network(*MLP[:-2], MLP[-1]))
    mine, theirs = planned(several), planned(alone)
    assert mine["parallel"]["axes"] == DATA_AND_TENSOR
    assert mine["parallel"]["global_batch_size"] == 64
    assert mine["parallel"]["divided"] == ["fc", "fc1", "fc2"]
    # fc2.bias is whole
    part = 4 * ((64 * 24 + 24 + 24 * 12 + 12 * 10 + 10) // 2 + 12)
    assert mine["memory"]["parameters_bytes"] == part
    assert theirs["memory"]["parameters_bytes"] == 4 * (64 * 24 + 24 + 24 * 12 + 12 + 12 * 10 + 10)
    # 32 rows: the gradient of fc1's input, fc2's output, the gradient of fc's input (each a ring of
    # two, there and back), fc's output (there); then a ring of two copies of the gradients
    values = 4 * 32 * (2 * (64 + 12 + 12) + 10) // 2
    assert mine["parallel"]["exchanged_bytes"] == values + part
    assert [one["strategy"] for one in mine["parallel"]["strategies"]] == ["tensor"]
    assert planned(mine["spec"])["spec"] == mine["spec"]


ODD = network({"name": "flat", "type": "Flatten"}, {**SMOOTH[4], "args": {"out_features": 11}})
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing to divide": ({"network": ODD}, "/parallel", "no layer of the network can be divided"),
    "foreach": (
        {"optimizer": {"type": "Adam", "args": {"lr": 0.01, "foreach": True}}},
        "/optimizer/args/foreach",
        "remove foreach",
    ),
    "optimizer": (
        {"optimizer": {"type": "Rprop", "args": {"lr": 0.1}}},
        "/optimizer/type",
        "with parallel.strategy tensor",
    ),
    "precision": ({"precision": "float16"}, "/precision", "strategy tensor: set bfloat16"),
    "sizes": (
        {"parallel": {"data": 2, "tensor": 2, "strategy": "fsdp"}},
        "/parallel/strategy",
        "the sizes data 2 and tensor 2 are those of tensor",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_divided_is_refused(case):
    changes, pointer, text = WRONG[case]
    several, _ = pair(2, strategy="tensor", network=network(*MLP))
    found = errors({**several, **copy.deepcopy(changes)})
    assert text in found[pointer], found


def test_a_global_batch_that_the_shares_of_rows_do_not_divide_is_refused():
    several, _ = pair(6, strategy={"data": 3, "tensor": 2}, network=network(*MLP))
    del several["data"]["batch_size"]
    several["data"]["global_batch_size"] = 64
    text = "64 rows cannot be divided among 3 shares of rows equally: set a multiple of 3"
    assert text in errors(several)["/data/global_batch_size"]
    several["data"]["global_batch_size"] = 66
    assert planned(several)["spec"]["data"]["batch_size"] == 22
