"""Processes that each keep a part of the network train as one process does."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.optim.optimizers import UNSHARDED, optimizer_classes
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
    table_of,
    token_table,
)
from tests.unit.engine.processes import run_processes
from tests.unit.engine.runs import DIGITS_META, captured, errors, losses, of_type, planned, run

pytestmark = pytest.mark.long

BOTH = {"data": 2, "fsdp": 2}
FUSED = {"lr": 0.01, "fused": True}
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"fused {name}": {"optimizer": {"type": name, "args": FUSED}} for name in ("Adam", "AdamW")},
    "foreach": {"optimizer": {"type": "Adam", "args": {"lr": 0.01, "foreach": True}}},
    "amsgrad": {"optimizer": {"type": "Adam", "args": {"lr": 0.01, "amsgrad": True}}},
    "deterministic": {"deterministic": True},
    "options of a layer": {
        "network": network(
            {**SMOOTH[0], "lr_scale": 0.5, "weight_decay": 0.1, "grad_clip": False}, *SMOOTH[1:]
        ),
        "grad_clip": {"type": "global_norm", "max": 0.5},
    },
    "a shared layer": {
        "network": network(
            SMOOTH[3],
            {"name": "a", "type": "Linear", "args": {"out_features": 64}},
            {"name": "b", "type": "Linear", "shared_with": "a"},
            SMOOTH[4],
        ),
        "stop": {"steps": 50},
    },
    "in place": {
        "network": network(
            {"name": "rows", "type": "Flatten", "args": {"start_dim": 1, "end_dim": 2}},
            {"name": "a", "type": "Linear", "args": {"out_features": 16}},
            {"name": "relu", "type": "ReLU", "args": {"inplace": True}},
            SMOOTH[3],
            SMOOTH[4],
        )
    },
    "a recurrent layer": {
        "network": network(
            {"name": "rows", "type": "Flatten", "args": {"start_dim": 1, "end_dim": 2}},
            {"name": "lstm", "type": "LSTM", "args": {"hidden_size": 7, "batch_first": True}},
            SMOOTH[3],
            SMOOTH[4],
        )
    },
}
"""Other settings that torch's sharded tensors could fail on."""


OFTEN = ("guards", "clip between", "clip by norm", "window", "accumulation", "ema")
RARELY = [name for name in (*OF_PARAMETERS, *VARIANTS, *SETTINGS) if name not in OFTEN]


@pytest.mark.parametrize(
    ("num", "strategy", "variant"),
    [
        *((2, "fsdp", variant) for variant in OFTEN),
        *(rarely(2, "fsdp", variant) for variant in RARELY),
        (3, "fsdp", "clipping"),
        (4, "fsdp", "adam"),
        (4, BOTH, "clipping"),
        rarely(4, BOTH, "accumulation"),
        rarely(4, BOTH, "ema"),
    ],
    ids=str,
)
def test_the_losses_are_those_of_one_process(num, strategy, variant, server, digits, tmp_path):
    more = copy.deepcopy({**VARIANTS, **OF_PARAMETERS, **SETTINGS}[variant])
    more["metrics"] = [{"type": "accuracy", "inputs": ["fc", "label"]}]
    data = {**VALIDATION, **more.pop("data", {})}
    rows = 66 if num == 3 else 64
    several, alone = pair(num, rows, strategy, data=data, **more)
    found = run_processes(server, tmp_path / "a", several, digits)
    expected = run(tmp_path / "b", alone, digits)
    assert_same_losses(found, expected)
    assert of_clipping(found) == pytest.approx(of_clipping(expected), rel=1e-4)


def of_clipping(records: list[dict[str, Any]]) -> list[float]:
    """The norms and the counts of clipped steps."""
    values = [item["values"] for item in of_type(records, "metrics")]
    return [x[name] for x in values for name in ("grad_norm", "clipped_steps") if name in x]


def test_bfloat16_learns_as_in_one_process(server, digits, tmp_path):
    """Also when activations are computed again, for which the parameters are gathered again."""
    more: dict[str, Any] = {"precision": "bfloat16", "stop": {"steps": 20}}
    more |= {"activation_checkpointing": ["conv1", "pool1", "flat"], "data": VALIDATION}
    several, alone = pair(2, 64, "fsdp", **more)
    found = run_processes(server, tmp_path / "a", several, digits)
    expected = run(tmp_path / "b", alone, digits)
    assert losses(found) == pytest.approx(losses(expected), rel=5e-3)
    exact = run(tmp_path / "c", {**alone, "precision": "float32"}, digits)
    assert losses(found)[:5] != pytest.approx(losses(exact)[:5], rel=1e-5)


@pytest.mark.parametrize(("num", "strategy"), [(2, "fsdp"), (4, BOTH)], ids=str)
def test_a_transformer_learns_as_in_one_process(num, strategy, server, tmp_path):
    table = token_table(tmp_path / "t")
    several, alone = pair(num, 64, strategy, **of_tokens("transformer"))
    found = run_processes(server, tmp_path / "a", several, table)
    assert_same_losses(found, run(tmp_path / "b", alone, table))


@pytest.mark.parametrize(("num", "strategy"), [(2, "fsdp"), (3, "fsdp"), (4, BOTH)], ids=str)
def test_what_probes_see_is_what_they_see_of_one_process(num, strategy, server, digits, tmp_path):
    want = ["stats", "full", "histogram"]
    probes = [
        {"layers": ["*"], "kinds": ALL_KINDS, "want": want, "every": 1},
        {"layers": ["*"], "kinds": ["output"], "phase": "evaluate", "every": 1},
    ]
    several, alone = pair(
        num, 60, strategy, data=VALIDATION, probes=probes, stop={"steps": 4}, optimizer=ADAM
    )
    mine = run_processes(server, tmp_path / "a", several, digits)
    theirs = run(tmp_path / "b", alone, digits)
    found, expected = table_of(mine), table_of(theirs)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=2e-3, abs=2e-5), key
    whole, theirs_whole = captured(mine, tmp_path / "a"), captured(theirs, tmp_path / "b")
    assert whole.keys() == theirs_whole.keys()
    for key, tensor in theirs_whole.items():
        torch.testing.assert_close(whole[key], tensor, rtol=2e-3, atol=2e-5, msg=str(key))


RESUMES = [(2, 2), (2, 1), (5, 4)]
KINDS = {1: (1, "data"), 2: (2, "fsdp"), 3: (2, "data"), 4: (4, BOTH), 5: (4, "fsdp")}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *RESUMES,
        *(rarely(*both) for both in itertools.product(KINDS, KINDS) if both not in RESUMES),
    ],
)
def test_a_job_resumes_under_another_strategy(first, second, server, digits, tmp_path):
    """Bit for bit under the same one, dropout included; else up to rounding."""
    drop = [{"name": "drop", "type": "Dropout", "args": {"p": 0.25}}] * (first == second)
    layers = [*SMOOTH[:-1], *drop, SMOOTH[-1]]
    more: dict[str, Any] = {"network": network(*layers), "optimizer": ADAM, "stop": {"steps": 20}}
    more |= {"checkpoint": {"every_steps": 7}, "average": {"type": "ema", "decay": 0.9}}

    def at(directory: Path, is_second: bool, **more_of_run: Any) -> list[dict[str, Any]]:
        num, strategy = KINDS[second if is_second else first]
        several, alone = pair(num, 64, strategy, **copy.deepcopy(more))
        if num == 1:
            return run(directory, alone, digits, **more_of_run)
        return run_processes(server, directory, several, digits, **more_of_run)

    assert_resumes(at, tmp_path, is_alike=first == second)


ELEMENTWISE = [name for name in optimizer_classes() if name not in ("SparseAdam", *UNSHARDED)]


@pytest.mark.parametrize(
    "name", [name if name in ("Adagrad", "SGD") else rarely(name) for name in ELEMENTWISE]
)
def test_optimizers_update_as_in_one_process(name, server, digits, tmp_path):
    more: dict[str, Any] = {"optimizer": {"type": name, "args": {"lr": 0.01}}}
    several, alone = pair(2, 64, "fsdp", data=VALIDATION, stop={"steps": 12}, **more)
    found = run_processes(server, tmp_path / "a", several, digits)
    assert_same_losses(found, run(tmp_path / "b", alone, digits), rel=1e-4)


def test_the_plan_says_what_shards_take():
    several, alone = pair(4, strategy=BOTH, network=network(SMOOTH[3], SMOOTH[4]), optimizer=ADAM)
    mine, theirs = planned(several), planned(alone)
    weights_bytes = 4 * (64 * 10 + 10)
    assert mine["parallel"]["axes"] == BOTH
    # half of what it does not have, for both passes and the gradients; and its half's ring of two
    assert mine["parallel"]["exchanged_bytes"] == 3 * weights_bytes // 2 + weights_bytes // 2
    assert mine["memory"]["parameters_bytes"] == weights_bytes // 2
    assert mine["memory"]["optimizer_state_bytes"] == theirs["memory"]["optimizer_state_bytes"] // 2
    assert mine["memory"]["gathered_bytes"] == 2 * weights_bytes
    # each process writes its part of a checkpoint, and of two copies one is written
    whole, own = theirs["memory"]["checkpoint_bytes"], mine["memory"]
    assert own["checkpoint_bytes"] == whole // 2
    used = own["total_bytes"] - own["checkpoint_bytes"]
    assert mine["parallel"]["host_bytes"] == 4 * used + whole
    by_name = {one["strategy"]: one for one in mine["parallel"]["strategies"]}
    assert by_name["data"]["exchanged_bytes"] == 2 * 3 * weights_bytes // 4
    assert by_name["fsdp"]["exchanged_bytes"] == 3 * 3 * weights_bytes // 4
    assert by_name["data"]["memory"]["parameters_bytes"] == weights_bytes
    assert by_name["fsdp"]["memory"]["parameters_bytes"] == weights_bytes // 4
    assert mine["spec"]["parallel"] == {
        "strategy": "fsdp",
        "processes": 4,
        **dict.fromkeys(("tensor", "pipeline", "schedule", "micro_batches")),
        **BOTH,
        "cpu_offload": False,
    }
    assert planned(mine["spec"])["spec"] == mine["spec"]


def test_the_plan_of_offloaded_parts_counts_the_memory_of_the_host():
    """Of 3 processes; torch pins a power of two for each part of a parameter and its gradient."""
    layers = network(SMOOTH[3], {**SMOOTH[4], "name": "a"}, {"name": "norm", "type": "BatchNorm1d"})
    layers["layers"].append(SMOOTH[4])
    more: dict[str, Any] = {"optimizer": ADAM, "average": {"type": "ema"}}
    several, _ = pair(3, 66, "fsdp", network=layers, **more)
    job = several | {"devices": {"type": "cuda"}}
    plain = planned(job)
    plan = planned({**job, "parallel": {**job["parallel"], "cpu_offload": True}})
    memory, before = plan["memory"], plain["memory"]
    weights_bytes = 4 * (64 * 10 + 10 + 10 + 10 + 10 * 10 + 10)
    buffers = 4 * (10 + 10) + 8
    # parts: 4 of 10 rows of 64 values, four times 4 values, 4 of 10 rows of 10 values
    pinned = 4 * (256 + 4 * 4 + 64)
    others = before["optimizer_state_bytes"] + -(-weights_bytes // 3)  # and their averages
    assert memory["offloaded_bytes"] == pytest.approx(2 * pinned + others, abs=3)
    assert memory["parameters_bytes"] == memory["averages_bytes"] == buffers
    assert memory["gradients_bytes"] == memory["optimizer_state_bytes"] == 0
    whole = before["gathered_bytes"]
    assert memory["gathered_bytes"] == whole + -(-whole // 3)
    for name in ("activations_bytes", "data_bytes", "checkpoint_bytes"):
        assert memory[name] == before[name]
    assert memory["total_bytes"] == sum(memory.values()) - memory["total_bytes"]
    needed = memory["offloaded_bytes"] + memory["data_bytes"] + memory["checkpoint_bytes"]
    assert plan["parallel"]["host_bytes"] == 3 * needed
    assert [one["parallel"]["cpu_offload"] for one in (plan, plain)] == [True, False]
    for listed in (plan, plain):
        *others, last = listed["parallel"]["strategies"]
        assert [(one["strategy"], one["cpu_offload"]) for one in others] == [
            ("data", False),
            ("fsdp", False),
        ]
        assert last == {
            "strategy": "fsdp",
            "cpu_offload": True,
            "memory": memory,
            "exchanged_bytes": plain["parallel"]["exchanged_bytes"],
            "host_bytes": 3 * needed,
        }


def test_the_plan_counts_the_whole_network_in_the_host_memory_of_each_process():
    """Until it is sharded, each process has all of it: with many processes that decides."""
    job, _ = pair(8, 64, "fsdp", network=network(SMOOTH[3], SMOOTH[4]))
    job |= {"devices": {"type": "cuda"}, "parallel": {**job["parallel"], "cpu_offload": True}}
    meta = {**DIGITS_META, "splits": {"train": 8, "test": 8}}
    plan = planned({**job, "optimizer": {"type": "SGD", "args": {"lr": 0.1}}}, meta)
    assert plan["parallel"]["host_bytes"] == 8 * (4 * (64 * 10 + 10) + plan["memory"]["data_bytes"])


SGD = {"type": "SGD"}
RPROP = {"type": "Rprop", "args": {"lr": 0.1}}


def test_a_plan_of_auto_is_that_of_data_and_lists_what_supports_the_job():
    several, _ = pair(2, strategy="auto")
    plan = planned(several)
    assert plan["spec"]["parallel"]["strategy"] == plan["parallel"]["strategy"] == "data"
    assert [one["strategy"] for one in plan["parallel"]["strategies"]] == ["data", "fsdp"]
    for change in ({"optimizer": RPROP}, {"precision": "float16"}):
        parallel = planned({**several, **change})["parallel"]
        assert [one["strategy"] for one in parallel["strategies"]] == ["data"], change


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "optimizer": (
        {"optimizer": {"type": "Rprop", "args": {"lr": 0.1}}},
        "/optimizer/type",
        "Rprop",
    ),
    "fused": ({"optimizer": {**SGD, "args": FUSED}}, "/optimizer/args/fused", "remove fused"),
    "precision": ({"precision": "float16"}, "/precision", "float16"),
    "layout": ({"memory_format": "channels_last"}, "/memory_format", "remove memory_format"),
    "strategy": (
        {"parallel": {"data": 2, "fsdp": 2, "strategy": "data"}},
        "/parallel/strategy",
        "remove strategy, or the sizes",
    ),
    "product": (
        {"parallel": {"data": 2, "fsdp": 2, "processes": 3}},
        "/parallel/processes",
        "data 2 and fsdp 2 make 4 processes, and processes is 3",
    ),
    "recorder": (
        {
            "probes": [
                {"layers": ["*"], "kinds": ["param"], "on": "nonfinite", "want": ["stats", "full"]}
            ]
        },
        "/probes/0/want",
        "remove full and sample",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_shards_do_not_support_is_refused(case):
    changes, pointer, text = WRONG[case]
    several, _ = pair(2, strategy="fsdp")
    found = errors({**several, **copy.deepcopy(changes)})
    assert text in found[pointer], found
