"""The plan of a pipeline: stages, memory, what is sent, and what it refuses."""

import json
from itertools import combinations
from typing import Any

import pytest

from engine.metrics.metrics import wanted
from glasshouse.spec import TrainJob, parse_job
from glasshouse.spec.pipeline import crossing, num_micro_batches, num_stages, stages_of
from tests.unit.engine.pipelines import MLP, at_stages, job, parsed
from tests.unit.engine.runs import errors, planned, spec

THREE = {"processes": 3}
TIED: list[dict[str, Any]] = [
    {
        "name": "wte",
        "type": "TiedEmbedding",
        "inputs": ["label"],
        "args": {"num_embeddings": 10, "embedding_dim": 8},
    },
    {"name": "mid", "type": "Linear", "args": {"out_features": 8}},
    {"name": "fc", "shared_with": "wte"},
]
BRANCHES: list[dict[str, Any]] = [
    {"name": "flat", "type": "Flatten"},
    {"name": "a", "type": "Linear", "args": {"out_features": 24}},
    {"name": "b", "type": "Linear", "args": {"out_features": 16}},
    {"name": "c", "type": "Linear", "args": {"out_features": 8}},
    {"name": "both", "type": "cat", "args": {"dim": 1}, "inputs": ["c", "a", "flat"]},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]
"""The last stage reads values of the first one."""
FORK: list[dict[str, Any]] = [
    {"name": "c", "type": "Linear", "inputs": ["flat"], "args": {"out_features": 8}},
    {"name": "both", "type": "cat", "args": {"dim": 1}, "inputs": ["a", "c"]},
    {"name": "d", "type": "Tanh", "inputs": ["c"]},
    {"name": "fc", "type": "Linear", "inputs": ["both"], "args": {"out_features": 10}},
]


def stages(plan: dict[str, Any]) -> list[list[str]]:
    return [stage["layers"] for stage in plan["parallel"]["stages"]]


def largest(plan: dict[str, Any]) -> int:
    return max(stage["memory"]["total_bytes"] for stage in plan["parallel"]["stages"])


def read(plan: dict[str, Any]) -> TrainJob:
    found = parse_job(json.dumps(plan["spec"]))
    assert isinstance(found, TrainJob)
    return found


# --- the stage of each layer -----------------------------------------------------------------


def test_a_layer_is_in_the_stage_of_the_one_before_it():
    layers = parsed(at_stages(None, None, None, 1, None, None)).network.layers
    found = stages_of(layers)
    assert found == {"flat": 0, "a": 0, "tanh": 0, "b": 1, "gelu": 1, "fc": 1}


@pytest.mark.parametrize("layers", [MLP, BRANCHES])
@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"schedule": "gpipe", "micro_batches": 2},
        THREE,
        THREE | {"micro_batches": 32},
        {"schedule": "interleaved"},
    ],
    ids=["1f1b", "gpipe", "three", "many", "interleaved"],
)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_the_plan_finds_the_cuts_whose_largest_stage_is_the_smallest(layers, parallel, optimizer):
    more = {"optimizer": {"type": optimizer, "args": {"lr": 0.1}}, "batch_size": 96}
    found = planned(job(layers, parallel, **more))
    count = len(found["parallel"]["stages"])
    by_hand: list[int] = []
    for cuts in combinations(range(1, len(layers)), count - 1):
        named = [sum(place >= cut for cut in cuts) for place in range(len(layers))]
        by_hand.append(largest(planned(job(at_stages(*named, layers=layers), parallel, **more))))
    assert len(by_hand) > 1
    assert largest(found) == min(by_hand) < max(by_hand)


def test_the_resolved_spec_says_what_was_found_and_has_the_same_plan():
    plan = planned(job())
    resolved = plan["spec"]
    assert resolved["parallel"]["schedule"] == "1f1b"
    assert resolved["parallel"]["micro_batches"] == 8
    found = read(plan)
    assert found.num_micro_batches == 8
    where = stages_of(found.network.layers)
    assert all(layer.stage == where[layer.name] for layer in found.network.layers)
    assert [[name for name, at in where.items() if at == s] for s in (0, 1)] == stages(plan)
    assert planned(resolved) == plan


def test_named_stages_are_kept():
    plan = planned(job(at_stages(0, None, None, None, None, 1)))
    assert stages(plan) == [["flat", "a", "tanh", "b", "gelu"], ["fc"]]
    assert [layer["stage"] for layer in plan["spec"]["network"]["layers"]] == [0, 0, 0, 0, 0, 1]
    again = planned(job(at_stages(0, 1, 0, 1, 0, 1, layers=BRANCHES[:2] + FORK)))
    assert stages(again) == [["flat", "c", "d"], ["a", "both", "fc"]]


def test_interleaved_stages_are_shared_out_in_turn():
    plan = planned(job(at_stages(0, 0, 1, 2, 2, 3), {"schedule": "interleaved"}))
    assert [stage["process"] for stage in plan["parallel"]["stages"]] == [0, 1, 0, 1]
    assert stages(plan) == [["flat", "a"], ["tanh"], ["b", "gelu"], ["fc"]]
    by_plan = planned(job(parallel={"schedule": "interleaved"}))
    assert len(by_plan["parallel"]["stages"]) == 4
    six = parsed(at_stages(*range(6)), {"schedule": "interleaved"})
    assert num_stages(six.network.layers, six.parallel) == 6


def test_a_preset_is_cut_by_the_plan():
    preset = {"type": "preset", "preset": "mlp", "args": {"hidden": [32, 32], "num_outputs": 10}}
    loss = {"type": "CrossEntropyLoss", "inputs": ["out", "label"]}
    plan = planned(job(loss=loss) | {"network": preset})
    assert plan["spec"]["network"]["type"] == "graph"
    assert {layer["stage"] for layer in plan["spec"]["network"]["layers"]} == {0, 1}


# --- micro-batches ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_size", "parallel", "number"),
    [
        (64, {}, 8),
        (6, {}, 6),
        (36, {}, 6),
        (64, {"micro_batches": 32}, 32),
        (13, {"schedule": "gpipe"}, 1),
        (64, {"processes": 4}, 16),
        (35, {}, 7),
        (35, {"schedule": "gpipe"}, 7),
        (42, {"schedule": "interleaved"}, 6),  # 7 cannot be run in 3 rounds
        (64, {"processes": None, "data": 2, "pipeline": 2}, 8),
    ],
)
def test_the_number_of_micro_batches_divides_the_batch(batch_size, parallel, number):
    found = parsed(None, parallel, batch_size=batch_size)
    assert found.num_micro_batches == number
    assert num_micro_batches(found.parallel, batch_size) == number


@pytest.mark.parametrize(
    ("parallel", "bubble"),
    [
        ({"micro_batches": 4}, 1 / 5),
        ({"micro_batches": 4, "schedule": "gpipe"}, 1 / 5),
        (THREE | {"micro_batches": 16}, 2 / 18),
        ({"micro_batches": 4, "schedule": "interleaved"}, 1 / 9),
    ],
)
def test_the_bubble_is_that_of_the_papers(parallel, bubble):
    found = planned(job(None, parallel))["parallel"]
    assert found["bubble"] == pytest.approx(bubble)
    assert found["micro_batches"] == parallel["micro_batches"]


# --- memory ----------------------------------------------------------------------------------

ADAM = {"type": "Adam", "args": {"lr": 0.1}}
SPLIT = at_stages(0, 0, 0, 1, 1, 1)
IN_FLIGHT = {"1f1b": (2, 1), "gpipe": (8, 8)}
MADE = (24 + 24, 24 + 16 + 16 + 10)
"""Values of a row: the second stage also receives the outputs of ``tanh``."""


@pytest.mark.parametrize("schedule", IN_FLIGHT)
def test_the_memory_of_a_stage_is_that_of_its_layers(schedule: str):
    average = {"type": "ema"}
    found = planned(job(SPLIT, {"schedule": schedule}, optimizer=ADAM, average=average))
    for stage, numbers in enumerate(((64 + 1) * 24, (24 + 1) * 16 + (16 + 1) * 10)):
        memory = dict(found["parallel"]["stages"][stage]["memory"])
        tensors = 2 + stage * 2
        assert memory["parameters_bytes"] == 4 * numbers
        assert memory["gradients_bytes"] == 4 * numbers
        assert memory["optimizer_state_bytes"] == 2 * 4 * numbers + 4 * tensors  # and the steps
        assert memory["averages_bytes"] == 4 * numbers
        assert memory["activations_bytes"] == IN_FLIGHT[schedule][stage] * 8 * 4 * MADE[stage]
        assert memory.pop("total_bytes") == sum(memory.values())


def test_what_is_computed_again_is_not_kept_of_all_micro_batches():
    layers = [*MLP[:4], {"name": "inner", "type": "Tanh"}, *MLP[4:]]
    kept = {"activation_checkpointing": ["a", "tanh", "gelu", "fc"]}
    found = planned(job(at_stages(0, *[1] * 6, layers=layers), {"schedule": "gpipe"}, **kept))
    memory = found["parallel"]["stages"][1]["memory"]
    # kept: a, inner, gelu and fc; computed again: tanh and b, eight rows at once
    assert memory["activations_bytes"] == 4 * (64 * (24 + 16 + 16 + 10) + 8 * (24 + 16)) + RECEIVED
    # no boundary begins and ends a segment in the second stage
    split = planned(job(at_stages(0, 0, 0, 0, 0, 0, 1, layers=layers), **kept))
    plain = planned(job(at_stages(0, 0, 0, 0, 0, 0, 1, layers=layers)))
    mine, theirs = (plan["parallel"]["stages"][1]["memory"] for plan in (split, plain))
    assert mine == theirs


RECEIVED = 4 * 64 * 64
"""The bytes of the images, flat."""


def test_the_memory_of_the_job_is_that_of_the_fullest_process():
    found = planned(job(SPLIT))
    first = found["parallel"]["stages"][0]["memory"]
    whole = planned(spec(network={"layers": MLP}))["memory"]
    batch = 64 * (64 * 4 + 8)  # images, and labels of eight bytes
    expected = {name: size for name, size in first.items() if name != "total_bytes"}
    expected["activations_bytes"] += batch
    saved = ("parameters_bytes", "optimizer_state_bytes")
    part = sum(first[name] for name in saved) / sum(whole[name] for name in saved)
    expected["checkpoint_bytes"] = int(part * whole["checkpoint_bytes"])  # each writes its own
    expected["data_bytes"] = whole["data_bytes"]
    assert found["memory"] == expected | {"total_bytes": sum(expected.values())}
    (own,) = found["parallel"]["strategies"]
    assert own["memory"] == found["memory"]
    second = found["parallel"]["stages"][1]["memory"]["total_bytes"]
    both = first["total_bytes"] + second + 2 * (batch + whole["data_bytes"])
    assert own["host_bytes"] == pytest.approx(both + whole["checkpoint_bytes"], abs=1)
    assert found["parallel"]["host_bytes"] == own["host_bytes"]


def test_a_process_has_the_memory_of_all_of_its_stages():
    found = planned(job(at_stages(0, 1, 1, 2, 2, 3), {"schedule": "interleaved"}))
    parts = [stage["memory"] for stage in found["parallel"]["stages"]]
    for name in ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes"):
        assert found["memory"][name] == parts[1][name] + parts[3][name]


# --- what is sent ----------------------------------------------------------------------------


def exchanged(stages: list[dict[str, Any]], parallel: dict[str, Any], **more: Any) -> list[int]:
    """What each stage sends in a step, and what the process sends that sends the most."""
    found = planned(job(stages, parallel, **more))["parallel"]
    return [*(stage["sent_bytes"] for stage in found["stages"]), found["exchanged_bytes"]]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_values_are_sent_forward_and_gradients_back(accumulate: int):
    tanh, gelu = 4 * 64 * 24, 4 * 64 * 16
    three = exchanged(at_stages(0, 0, 0, 1, 1, 2), THREE, accumulate=accumulate)
    assert three == [accumulate * size for size in (tanh, tanh + gelu, gelu, tanh + gelu)]


def test_a_process_with_several_stages_sends_what_they_send():
    a, tanh, gelu = 4 * 64 * 24, 4 * 64 * 24, 4 * 64 * 16
    found = exchanged(at_stages(0, 0, 1, 2, 2, 3), {"schedule": "interleaved"})
    assert found == [a, a + tanh, tanh + gelu, gelu, a + tanh + gelu]


def test_what_skips_a_stage_passes_through_it():
    plan = planned(job(at_stages(0, 0, 1, 2, 3, 3, layers=BRANCHES), {"processes": 4}))
    layers = read(plan)
    where = stages_of(layers.network.layers)
    assert crossing(layers.network.layers, where, wanted(layers)) == [
        ("flat", "a"),
        ("flat", "a", "b"),
        ("flat", "a", "c"),
    ]


def test_gradients_of_values_without_parameters_are_not_sent_back():
    a, c, flat = 4 * 64 * 24, 4 * 64 * 8, 4 * 64 * 64
    found = exchanged(at_stages(0, 0, 0, 0, 1, 1, layers=BRANCHES), {})
    assert found == [a + c + flat, a + c, a + c + flat]


def test_what_is_read_after_the_forward_pass_is_sent_to_the_last_stage():
    metrics = [{"type": "accuracy", "inputs": ["a", "label"]}]
    assert exchanged(SPLIT, {}, metrics=metrics)[0] == 4 * 64 * (24 + 24)  # tanh, and a
    network = {"layers": SPLIT, "outputs": ["fc", "a"]}
    found = planned({**job(SPLIT), "network": network})["parallel"]
    assert found["stages"][0]["sent_bytes"] == 4 * 64 * (24 + 24)


def test_copies_of_a_stage_sum_its_gradients():
    both = {"processes": None, "data": 2, "pipeline": 2}
    alone, found = exchanged(SPLIT, {}), exchanged(SPLIT, both)
    assert found[:2] == alone[:2]
    assert found[2] == max(alone[0] + 4 * (64 + 1) * 24, alone[1] + 4 * (25 * 16 + 17 * 10))


SHARDED = {"processes": None, "fsdp": 2, "pipeline": 2}


def test_processes_with_the_same_stage_shard_its_parameters():
    """They have the parameters and gradients whole during a step, and gather them once."""
    alone, found = exchanged(SPLIT, {}), exchanged(SPLIT, SHARDED)
    first, second = 4 * (64 + 1) * 24, 4 * (25 * 16 + 17 * 10)
    assert found[:2] == alone[:2]
    assert found[2] == max(alone[0] + 2 * first // 2, alone[1] + 2 * second // 2)
    plans = [planned(job(SPLIT, how, optimizer=ADAM)) for how in ({}, SHARDED)]
    whole, parts = (plan["parallel"]["stages"][0]["memory"] for plan in plans)
    for name in ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes"):
        assert parts[name] == whole[name] // 2
    assert parts["gathered_bytes"] == whole["parameters_bytes"] + whole["gradients_bytes"]
    saved = plans[1]["memory"]["checkpoint_bytes"]
    assert saved == pytest.approx(plans[0]["memory"]["checkpoint_bytes"] / 2, abs=1)


def test_what_stages_share_is_not_sharded():
    layers = [
        {"name": "flat", "type": "Flatten"},
        {"name": "a", "type": "Linear", "args": {"out_features": 64}},
        {"name": "b", "shared_with": "a"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    found = planned(job(at_stages(0, 0, 1, 1, layers=layers), SHARDED))
    first, second = (stage["memory"] for stage in found["parallel"]["stages"])
    table, last = 4 * 65 * 64, 4 * 65 * 10
    assert (first["parameters_bytes"], first["gathered_bytes"]) == (table, 0)
    assert (second["parameters_bytes"], second["gathered_bytes"]) == (table + last // 2, 2 * last)


@pytest.mark.parametrize("kind", ["param", "param_grad", "update"])
def test_metrics_of_training_batches_read_no_parameters(kind: str):
    metrics = [{"type": "l2_ratio", "inputs": ["a", f"a.weight/{kind}"]}]
    detail = errors(job(SPLIT, metrics=metrics))["/metrics/0/inputs/1"]
    for part in ("l2_ratio", f"'a.weight/{kind}'", "outputs", "probe", "data"):
        assert part in detail
    metrics = [{"type": "l2_ratio", "inputs": ["a", "fc/output_grad"]}]
    assert planned(job(SPLIT, metrics=metrics))["parallel"]["stages"]


def test_a_metric_of_what_is_not_there_is_refused_as_in_other_jobs():
    for name in ("fc.3", "tanh.inner", "none"):
        metrics = [{"type": "mean", "inputs": [name]}]
        assert "/metrics/0/inputs/0" in errors(job(metrics=metrics)), name


# --- what is refused -------------------------------------------------------------------------


def test_layers_that_share_running_statistics_stay_together():
    layers = [
        {"name": "a", "type": "Linear", "args": {"out_features": 8}},
        {"name": "norm", "type": "BatchNorm1d"},
        {"name": "b", "type": "Linear", "args": {"out_features": 8}},
        {"name": "again", "shared_with": "norm"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    flat = {"name": "flat", "type": "Flatten"}
    found = stages(planned(job([flat, *layers], {"processes": 4})))
    assert found == [["flat"], ["a"], ["norm", "b", "again"], ["fc"]]
    detail = errors(job([flat, *layers], {"processes": 5}))["/parallel"]
    for part in ("needs 5 stages", "the 6 layers", "into 4 at most", "'norm' and 'again'", "fewer"):
        assert part in detail
    named = [{**item, "stage": int(number > 1)} for number, item in enumerate(layers)]
    found = errors(job([{**flat, "stage": 0}, *named]))["/network/layers/4/stage"]
    for part in ("'again' in stage 1", "running statistics of 'norm' in stage 0", "same stage"):
        assert part in found


def test_a_copy_of_shared_parameters_takes_memory_and_is_sent():
    tied = [{**item, "stage": number // 2} for number, item in enumerate(TIED)]
    first, second = planned(job(tied, batch_size=60))["parallel"]["stages"]
    table, mid = 4 * 10 * 8, 4 * 9 * 8
    assert first["memory"]["parameters_bytes"] == table + mid
    assert second["memory"]["parameters_bytes"] == second["memory"]["gradients_bytes"] == table
    assert second["memory"]["optimizer_state_bytes"] == 0
    crossing_bytes = 4 * 60 * 8
    assert (first["sent_bytes"], second["sent_bytes"]) == (crossing_bytes + table,) * 2


def test_more_stages_than_layers():
    detail = errors(job(None, {"processes": 8}))["/parallel"]
    assert "needs 8 stages, and the 6 layers can be cut into 6 at most: use fewer" in detail


IDS: list[dict[str, Any]] = [
    {"name": "flat", "type": "Flatten"},
    {"name": "best", "type": "argmax", "args": {"dim": 1}},
    {"name": "a", "type": "Linear", "inputs": ["flat"], "args": {"out_features": 8}},
    {
        "name": "emb",
        "type": "Embedding",
        "inputs": ["best"],
        "args": {"num_embeddings": 64, "embedding_dim": 8},
    },
    {"name": "sum", "type": "add", "inputs": ["emb", "a"]},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]


def test_no_stage_sends_integers():
    plan = planned(job(IDS))
    first, second = stages(plan)
    assert ("best" in first) == ("emb" in first), (first, second)
    detail = errors(job(IDS, {"processes": 5}))["/parallel"]
    assert "'emb' reads 'best', whose values are integers" in detail
    found = errors(job(at_stages(0, 0, 0, 1, 1, 1, layers=IDS)))
    assert "'best' of stage 0" in found["/network/layers/3/stage"]
    late = {"type": "CrossEntropyLoss", "inputs": ["fc", "best"]}
    found = errors(job(at_stages(0, 0, 0, 0, 0, 1, layers=IDS), loss=late))
    assert "a loss, a metric or the output reads 'best'" in found["/network/layers/1/stage"]
    assert "'best', whose values are integers" in errors(job(IDS, THREE, loss=late))["/parallel"]


@pytest.mark.parametrize("optimizer", ["Adafactor", "Rprop"])
def test_optimizers_of_whole_parameters_are_planned(optimizer: str):
    assert planned(job(optimizer={"type": optimizer}))["parallel"]["stages"]


def test_fused_updates_are_those_of_whole_parameters():
    for name in ("fused", "foreach"):
        args = {"type": "SGD", "args": {"lr": 0.1, name: True}}
        assert planned(job(optimizer=args))["parallel"]["stages"]


def test_a_probe_of_a_rank_is_planned():
    probe = {"layers": ["a"], "kinds": ["output"], "every": 1, "ranks": [1]}
    assert planned(job(probes=[probe]))["probes"][0]["matched"] == ["a"]


# --- auto ------------------------------------------------------------------------------------


def auto(**data: Any) -> dict[str, Any]:
    whole = spec(network={"layers": MLP}, parallel={"strategy": "auto", "processes": 2})
    del whole["data"]["batch_size"]
    return whole | {"data": whole["data"] | data}


def test_auto_knows_what_a_pipeline_would_take():
    plan = planned(auto(global_batch_size=64))
    assert plan["parallel"]["strategy"] == "data"
    assert plan["spec"]["data"]["batch_size"] == 32
    listed = plan["parallel"]["strategies"]
    assert [one["strategy"] for one in listed] == ["data", "fsdp", "tensor", "pipeline"]
    named = auto(global_batch_size=64) | {"parallel": {"strategy": "pipeline", "processes": 2}}
    found = planned(named)["parallel"]
    assert found["strategies"] == [listed[-1]]
    assert found["global_batch_size"] == 64


def test_auto_keeps_the_batches_of_the_job():
    listed = planned(auto(batch_size=32))["parallel"]["strategies"]
    assert [one["strategy"] for one in listed] == ["data", "fsdp"]


def test_auto_leaves_out_what_does_not_support_the_job():
    recorder = {"layers": ["a"], "kinds": ["output"], "on": "nonfinite"}
    listed = planned(auto(global_batch_size=64) | {"probes": [recorder]})["parallel"]["strategies"]
    assert [one["strategy"] for one in listed] == ["data", "fsdp", "tensor"]
    odd = planned(auto(global_batch_size=26))["parallel"]["strategies"]
    assert odd[-1]["strategy"] == "pipeline"  # 26 rows are two micro-batches
