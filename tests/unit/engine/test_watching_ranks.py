"""What probes record of single processes is what each of them computes, by plain torch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from engine.probes.statistics import plain_torch
from glasshouse.histogram_bins import quantiles
from tests.unit.engine import ragged
from tests.unit.engine.parallel_jobs import VALIDATION, network, pair, table_of
from tests.unit.engine.processes import run_processes
from tests.unit.engine.runs import captured, of_type, planned

pytestmark = pytest.mark.long
FC = {"name": "fc", "type": "Linear", "args": {"out_features": 10}}
LAYERS = [{"name": "flat", "type": "Flatten"}, FC]
IN_ORDER = {"shuffle": {"enabled": False}}
OwnTensors = dict[tuple[int, str, str, int], torch.Tensor]


def job(num: int, strategy: Any, *probes: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A job of several processes with one layer, whose rows are in the order of the file."""
    more = {"stop": {"steps": 2}, "data": IN_ORDER, "network": network(*LAYERS), **more}
    return pair(num, strategy=strategy, probes=[*probes], **more)[0]


def probe(*kinds: str, ranks: Any = "all", layers: str = "*", **more: Any) -> dict[str, Any]:
    """A probe of every step."""
    return {"layers": [layers], "kinds": [*kinds], "every": 1, "ranks": ranks, **more}


def own_rows(records: list[dict[str, Any]]) -> dict[tuple[Any, ...], list[float]]:
    """The statistics of single processes, by step, phase, layer, kind and rank."""
    return {
        (item["step"], item["phase"], *row[:2], part["rank"]): [float(value) for value in row[2:]]
        for item in of_type(records, "stats")
        for part in item.get("ranks", [])
        for row in part["rows"]
    }


def own_tensors(records: list[dict[str, Any]], directory: Path) -> OwnTensors:
    """The tensors of single processes that were kept, by step, layer, kind and rank."""
    return {
        (record["step"], entry["layer"], entry["kind"], entry["rank"]): file[entry["tensor"]]
        for record in of_type(records, "captures")
        for file in [load_file(directory / record["file"])]
        for entry in record["tensors"]
        if "rank" in entry
    }


def merged_only(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records without what is of single processes."""
    return [
        {**record, "tensors": [one for one in record["tensors"] if "rank" not in one]}
        if record["type"] == "captures"
        else record
        for record in records
    ]


def by_hand(digits: Path, weight: torch.Tensor, bias: torch.Tensor) -> dict[str, torch.Tensor]:
    """The first step of 64 rows, by plain torch."""
    image = torch.from_numpy(np.load(digits / "train/0.npy")[:64]).float() / 255
    label = torch.from_numpy(np.load(digits / "train/1.npy")[:64])
    layer = nn.Linear(64, 10)
    layer.weight.data, layer.bias.data = weight.clone(), bias.clone()
    flat = image.flatten(1)
    output = layer(flat)
    output.retain_grad()
    functional.cross_entropy(output, label).backward()
    assert output.grad is not None
    return {"input": flat, "output": output.detach(), "output_grad": output.grad}


@pytest.mark.parametrize("strategy", ["data", "fsdp"])
def test_statistics_of_a_rank_are_those_of_its_rows(strategy, server, digits, tmp_path):
    """The merged values are those without ``ranks``, bit for bit."""
    kinds = ["param", "input", "output", "output_grad"]
    want = ["stats", "full", "histogram", "quantiles"]
    asked = job(2, strategy, probe(*kinds, want=want, layers="fc*"))
    records = run_processes(server, tmp_path / "a", asked, digits)
    plain = job(2, strategy, probe(*kinds, want=want, layers="fc*", ranks="merged"))
    without = run_processes(server, tmp_path / "b", plain, digits)
    assert table_of(records) == table_of(without)
    assert not any("ranks" in item for item in of_type(without, "stats"))
    for one, other in zip(of_type(records, "stats"), of_type(without, "stats"), strict=True):
        assert one["histograms"] == other["histograms"]
        assert one["quantiles"] == other["quantiles"]
    kept = captured(merged_only(records), tmp_path / "a")
    assert kept.keys() == captured(without, tmp_path / "b").keys()

    expected = by_hand(digits, kept[0, "fc.weight", "param"], kept[0, "fc.bias", "param"])
    rows, tensors = own_rows(records), own_tensors(records, tmp_path / "a")
    parts = {part["rank"]: part for part in of_type(records, "stats")[0]["ranks"]}
    for kind, whole in expected.items():
        for rank in (0, 1):
            own = whole[32 * rank : 32 * (rank + 1)]
            torch.testing.assert_close(tensors[0, "fc", kind, rank], own, rtol=1e-4, atol=1e-7)
            figures = plain_torch.figures(own.double())
            assert rows[0, "train", "fc", kind, rank] == pytest.approx(figures, rel=1e-4, abs=1e-7)
            bins, counts = plain_torch.counts(tensors[0, "fc", kind, rank])
            [found] = [item[2:] for item in parts[rank]["histograms"] if item[:2] == ["fc", kind]]
            assert found == [bins, counts]
            low, high = (float(tensors[0, "fc", kind, rank].aminmax()[n]) for n in (0, 1))
            [found] = [item[2:] for item in parts[rank]["quantiles"] if item[:2] == ["fc", kind]]
            assert found == pytest.approx([*quantiles(bins, counts, low=low, high=high)])


def test_under_data_each_rank_has_the_same_parameters(server, digits, tmp_path):
    """They are those that the rank has: they are sent, not copied from process 0."""
    kinds = ["param", "param_grad", "update", "optim_state"]
    asked = job(2, "data", probe(*kinds, want=["stats", "full", "histogram"]))
    records = run_processes(server, tmp_path, asked, digits)
    rows, merged = own_rows(records), table_of(records)
    assert {key[3] for key in merged} == {*kinds}
    assert {*rows} == {(*key, rank) for key in merged for rank in (0, 1)}
    assert all(rows[key] == merged[key[:-1]] for key in rows)
    whole = captured(merged_only(records), tmp_path)
    own = own_tensors(records, tmp_path)
    assert {*own} == {(*key, rank) for key in whole for rank in (0, 1)}
    assert all(torch.equal(tensor, whole[key[:-1]]) for key, tensor in own.items())
    for item in of_type(records, "stats"):
        assert [part["histograms"] for part in item["ranks"]] == [item["histograms"]] * 2


@pytest.mark.parametrize("strategy", ["fsdp", {"data": 2, "fsdp": 2}], ids=str)
def test_under_fsdp_each_rank_has_its_part_of_the_parameters(strategy, server, digits, tmp_path):
    """torch divides the first axis: 10 rows of the weight are 5 and 5."""
    num = 2 if strategy == "fsdp" else 4
    asked = job(num, strategy, probe("param", "param_grad", "update", want=["stats", "full"]))
    records = run_processes(server, tmp_path, asked, digits)
    whole = captured(merged_only(records), tmp_path)
    own, rows = own_tensors(records, tmp_path), own_rows(records)
    assert {*own} == {(*key, rank) for key in whole for rank in range(num)}
    for (step, layer, kind, rank), tensor in own.items():
        part = whole[step, layer, kind][5 * (rank % 2) : 5 * (rank % 2) + 5]
        assert torch.equal(tensor, part), (step, layer, kind, rank)
        figures = plain_torch.figures(part.double())
        assert rows[step, "train", layer, kind, rank] == pytest.approx(figures, rel=1e-5, abs=1e-9)


def test_a_list_of_ranks_records_those_only_and_beside_the_forms_of_other_probes(
    server, digits, tmp_path
):
    """One probe wants rank 2, another one more forms of all processes together."""
    asked = job(
        3,
        "data",
        probe("output", ranks=[2], layers="fc"),
        probe("output", "param", ranks="merged", layers="fc", want=["histogram", "full"]),
        probe("param", ranks=[0], layers="fc.bias", want=["sample"]),
    )
    records = run_processes(server, tmp_path, asked, digits)
    assert {key[2:] for key in own_rows(records)} == {("fc", "output", 2)}
    assert all(
        {*part} == {"rank", "rows"} for x in of_type(records, "stats") for part in x["ranks"]
    )
    assert {key[1:] for key in own_tensors(records, tmp_path)} == {("fc.bias", "param", 0)}


def test_a_rank_without_rows_has_no_values_of_the_step(server, digits, tmp_path):
    """149 of 300 rows, 149 again, then 2 rows for 4 processes: the last two have none."""
    train = {"dataset": "ds_1", "split": "train", "fraction": [0, 0.995]}  # 298 rows
    asked = job(
        4,
        "data",
        probe("output", "param", layers="fc*", want=["stats", "full"]),
        rows=148,
        data={**IN_ORDER, "train": train},
        stop={"steps": 3},
    )
    records = run_processes(server, tmp_path, asked, digits)
    rows = own_rows(records)
    ranks = {
        step: {key[4] for key in rows if key[:1] + key[3:4] == (step, "output")}
        for step in range(3)
    }
    assert ranks == {0: {0, 1, 2, 3}, 1: {0, 1, 2, 3}, 2: {0, 1}}
    assert {key[4] for key in rows if key[0] == 2 and key[3] == "param"} == {0, 1, 2, 3}
    sizes = {
        key[3]: len(x)
        for key, x in own_tensors(records, tmp_path).items()
        if key[:3] == (2, "fc", "output")
    }
    assert sizes == {0: 1, 1: 1}


def test_the_loss_of_a_rank_is_what_it_adds_to_the_loss_of_the_step(server, digits, tmp_path):
    asked = job(
        2,
        "data",
        probe("output", layers="loss", want=["stats", "full"]),
        probe("output", layers="fc", phase="evaluate"),
        data={**IN_ORDER, **VALIDATION},
        evaluate={"every_steps": 2},
    )
    records = run_processes(server, tmp_path, asked, digits)
    own = own_tensors(records, tmp_path)
    whole = captured(merged_only(records), tmp_path)[0, "loss", "output"]
    assert own[0, "loss", "output", 0].shape == ()
    torch.testing.assert_close(sum(own[0, "loss", "output", rank] for rank in (0, 1)), whole)
    assert {key[1:] for key in own_rows(records) if key[1] == "evaluate"} == {
        ("evaluate", "fc", "output", rank) for rank in (0, 1)
    }


def test_ranks_beside_a_flight_recorder(server, digits, tmp_path):
    """The recorder keeps merged values; the other probe sends those of its rank."""
    recorder = {"layers": ["*"], "kinds": ["output"], "on": "nonfinite"}
    asked = job(2, "data", probe("output", ranks=[1], layers="fc"), recorder)
    asked["optimizer"] = {"type": "SGD", "args": {"lr": 1e38}}
    asked |= {"stop": {"steps": 4}, "guards": {"nonfinite": {"check": []}}}
    records = run_processes(server, tmp_path, asked, digits)
    late = [x for x in of_type(records, "stats") if [row[0] for row in x["rows"]] == ["flat"]]
    assert late
    assert not any("ranks" in item for item in late)
    assert {key[2:] for key in own_rows(records)} == {("fc", "output", 1)}


def test_the_plan_counts_the_tensors_of_single_processes():
    """64 rows of 10 float32: once merged, and 32 rows of each process that is asked for."""
    whole = 64 * 10 * 4
    sizes = [
        planned(job(2, "data", probe("output", layers="fc", want=["full"], ranks=ranks)))["probes"]
        for ranks in ("merged", [1], "all")
    ]
    assert [one["bytes_per_step"] for [one] in sizes] == [whole, whole * 3 // 2, whole * 2]
    weight = 10 * 64 * 4
    for strategy, expected in (("data", 3 * weight), ("fsdp", 2 * weight)):
        asked = job(2, strategy, probe("param", layers="fc.weight", want=["full"]))
        assert planned(asked)["probes"][0]["bytes_per_step"] == expected


@pytest.mark.parametrize(
    ("num", "strategy"), [(2, "tensor"), (4, {"data": 2, "tensor": 2})], ids=str
)
def test_where_layers_are_divided_each_rank_has_what_it_computes(
    num, strategy, server, digits, tmp_path
):
    """Processes that have the same rows have equal inputs; the merged values do not change."""
    want = ["stats", "full", "histogram"]
    kinds = ["param", "input", "output", "output_grad", "param_grad"]
    wide = {"name": "wide", "type": "Linear", "args": {"out_features": 32}}
    layers = network(LAYERS[0], wide, {"name": "act", "type": "GELU"}, FC)
    asked = job(num, strategy, probe(*kinds, want=want), network=layers)
    records = run_processes(server, tmp_path / "a", asked, digits)
    plain = job(num, strategy, probe(*kinds, want=want, ranks="merged"), network=layers)
    without = run_processes(server, tmp_path / "b", plain, digits)
    assert table_of(records) == table_of(without)
    whole = captured(merged_only(records), tmp_path / "a")
    expected = captured(without, tmp_path / "b")
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[key], tensor) for key, tensor in expected.items())
    own, rows = own_tensors(records, tmp_path / "a"), own_rows(records)
    assert {*own} == {(*key, rank) for key in whole for rank in range(num)}
    for (step, layer, kind, rank), tensor in own.items():
        figures = plain_torch.figures(tensor.double())
        found = rows[step, "train", layer, kind, rank]
        assert found == pytest.approx(figures, rel=1e-5, abs=1e-9), (step, layer, kind, rank)
    shares = num // 2
    for rank in range(num):
        share = slice(64 // shares * (rank // 2), 64 // shares * (rank // 2 + 1))
        assert torch.equal(own[0, "wide", "input", rank], whole[0, "wide", "input"][share])
        weight = own[0, "wide.weight", "param", rank]
        assert torch.equal(weight, whole[0, "wide.weight", "param"][16 * (rank % 2) :][:16])


def test_rows_that_are_padded_to_different_lengths_are_kept_by_rank(server, tmp_path):
    """They cannot be put together; before, nothing of them was kept."""
    asked = ragged.job(ragged.LSTM, stop={"steps": 1})
    asked["data"] = {**asked["data"], "batch_size": 6, **IN_ORDER}
    asked["parallel"] = {"strategy": "data", "processes": 2}
    asked["probes"] = [probe("output", layers="emb", want=["full"])]
    records = run_processes(server, tmp_path / "a", asked, ragged.texts(tmp_path / "t"))
    shapes = {key[3]: [*x.shape] for key, x in own_tensors(records, tmp_path / "a").items()}
    assert shapes == {0: [6, 7, 4], 1: [6, 8, 4]}
    assert captured(merged_only(records), tmp_path / "a") == {}
    [dropped] = of_type(records, "dropped")
    assert "different shapes in each process: emb" in dropped["what"]
