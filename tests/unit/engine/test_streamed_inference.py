"""Inference of more rows than one part: formats, several processes, and what is computed again."""

import csv
import json
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.inference import parts
from engine.inference.blocks import Block, Column, joined
from engine.inference.files import Whole
from engine.inference.parts import Part, Plan
from engine.network.network import Network
from glasshouse.spec import parse_job
from tests.unit.engine.processes import finish, fork_server_in, start_resolved
from tests.unit.engine.ragged import job, meta_of, texts, write_ragged
from tests.unit.engine.runs import errors, of_type, planned, run
from tests.unit.engine.runs import spec as cnn_job
from worker.processes.fork_server import ForkServerClient

NUM_ROWS = 9_000
BATCH = 100
PLAN = Plan(NUM_ROWS, BATCH)
ARROW = "application/vnd.apache.arrow.file"
Trained = tuple[dict[str, Any], Path, Path]


def ids_of(row: int) -> list[int]:
    """The longest row, of nine steps, is in the last part."""
    return [(row + step) % 10 for step in range(9 if row == NUM_ROWS - 7 else row % 4 + 1)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The resolved spec of a job, its checkpoint, and the rows of inferences."""
    folder = tmp_path_factory.mktemp("trained")
    few = texts(folder / "few")
    resolved = planned(job(), meta_of(few))["spec"]
    records = run(folder / "job", resolved, few)
    checkpoint = folder / "job" / of_type(records, "checkpoint")[-1]["dir"]
    return resolved, checkpoint, write_ragged(folder / "many", [
        {"ids": ids_of(row)} for row in range(NUM_ROWS)
    ])  # fmt: skip


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Generator[ForkServerClient]:
    with fork_server_in(tmp_path_factory.mktemp("forks")) as server:
        yield server


def spec_of(**changes: Any) -> dict[str, Any]:
    data = {"dataset": "ds_1", "batch_size": BATCH} | changes.pop("data", {})
    return {"kind": "infer", "job": "job_x", "data": data, **changes}


def infer(
    folder: Path, trained: Trained, stored: dict[str, str] | None = None, **changes: Any
) -> list[dict[str, Any]]:
    resolved, checkpoint, table = trained
    more = {"trained_by": resolved, "checkpoint": {"dir": str(checkpoint)}, "stored": stored or {}}
    return run(folder, spec_of(**changes), table, **more)


@torch.inference_mode()
def expected(trained: Trained) -> tuple[Tensor, list[Tensor]]:
    """The scores of all rows, and the embeddings of their steps, from torch alone."""
    weights = load_file(trained[1] / "model.safetensors")
    graph = parse_job(json.dumps(trained[0])).network
    network = Network(graph, ["emb", "fc"])
    network.load_state_dict(weights)
    network.eval()
    scores, steps = [], []
    for width in sorted({len(ids_of(row)) for row in range(NUM_ROWS)}):
        rows = [row for row in range(NUM_ROWS) if len(ids_of(row)) == width]
        x = torch.tensor([ids_of(row) for row in rows])
        found = network({"ids": x, "ids.lengths": torch.full((len(rows),), width)})
        scores += zip(rows, found["fc"], strict=True)
        steps += zip(rows, found["emb"], strict=True)
    ordered = [item for _, item in sorted(scores, key=lambda one: one[0])]
    return torch.stack(ordered), [item for _, item in sorted(steps, key=lambda one: one[0])]


@pytest.fixture(scope="module")
def known(trained: Trained) -> tuple[Tensor, list[Tensor]]:
    return expected(trained)


def test_parts_are_whole_in_themselves_and_joined_in_the_order_of_the_rows(
    trained: Trained, known: tuple[Tensor, list[Tensor]], tmp_path: Path
):
    records = infer(tmp_path, trained, outputs=["emb", "fc"])
    scores, steps = known
    found = load_file(tmp_path / "artifacts" / "outputs.safetensors")
    assert PLAN.num_parts == 3
    torch.testing.assert_close(found["fc/value"], scores)
    assert torch.equal(found["fc/id"], found["fc/value"].argmax(1))
    torch.testing.assert_close(found["fc/prob"], found["fc/value"].softmax(1).max(1).values)
    assert found["emb/value"].shape == (NUM_ROWS, 9, 4)  # the longest row of all parts
    assert found["emb/lengths"].tolist() == [len(ids_of(row)) for row in range(NUM_ROWS)]
    for row in (0, 3, 4095, 4096, NUM_ROWS - 7, NUM_ROWS - 1):
        end = len(ids_of(row))
        torch.testing.assert_close(found["emb/value"][row, :end], steps[row])
        assert not found["emb/value"][row, end:].any()
    told = of_type(records, "artifact")
    assert [item["media_type"] for item in told[:3]] == [ARROW] * 3
    (removed,) = of_type(records, "artifacts_removed")
    assert removed["names"] == [item["name"] for item in told[:3]]
    assert [item["name"] for item in told[3:]] == ["outputs.safetensors", "predictions.csv"]
    at = [record["type"] for record in records]
    assert at.index("artifacts_removed") > max(n for n, kind in enumerate(at) if kind == "artifact")
    with pa.ipc.open_file(tmp_path / told[1]["file"]) as file:
        table = file.read_all()
        assert file.num_record_batches == 1  # small blocks are joined
    second = range(PLAN.batches(1).start * BATCH, PLAN.batches(1).stop * BATCH)
    assert table["row"].to_pylist() == list(second)
    assert table["emb/value"][1].as_py() == found["emb/value"][second[1], :2].tolist()
    progress = of_type(records, "progress")[-1]
    assert (progress["samples"], progress["num_steps"], progress["step"]) == (NUM_ROWS, 90, 90)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("axis", [None, 1])
def test_npz_has_the_tensors_of_safetensors(
    trained: Trained, tmp_path: Path, layout: str, axis: int | None
):
    # joined, packed outputs must have the same steps
    outputs = ["emb", "lstm" if layout == "packed" and axis == 1 else "fc"]
    asked = {"outputs": outputs, "sequence_layout": layout, "fields": ["value"]}
    asked |= {} if axis is None else {"flatten": {"axis": axis}}
    infer(tmp_path / "a", trained, **asked)
    infer(tmp_path / "b", trained, format="npz", **asked)
    tensors = load_file(tmp_path / "a" / "artifacts" / "outputs.safetensors")
    with np.load(tmp_path / "b" / "artifacts" / "outputs.npz", allow_pickle=False) as arrays:
        assert sorted(arrays) == sorted(tensors)
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(arrays[name], tensor.numpy())
    num_steps = sum(len(ids_of(row)) for row in range(NUM_ROWS))
    if axis is None:
        shape = (num_steps, 4) if layout == "packed" else (NUM_ROWS, 9, 4)
        assert tensors["emb/value"].shape == shape
    else:
        assert tensors["value"].shape == (
            (num_steps, 9) if layout == "packed" else (NUM_ROWS, 9 * 4 + 2)
        )


def test_formats_by_row_say_the_same(
    trained: Trained, known: tuple[Tensor, list[Tensor]], tmp_path: Path
):
    scores, steps = known
    asked = {"outputs": ["fc", "emb"], "fields": ["value", "id", "top_k"], "top_k": 2}
    for ending in ("jsonl", "parquet"):
        infer(tmp_path / ending, trained, format=ending, **asked)
    lines = (tmp_path / "jsonl" / "artifacts" / "outputs.jsonl").read_text().splitlines()
    read = [json.loads(line) for line in lines]
    table = pq.read_table(tmp_path / "parquet" / "artifacts" / "outputs.parquet").to_pylist()
    assert len(read) == len(table) == NUM_ROWS
    assert [row["row"] for row in table] == list(range(NUM_ROWS))
    for number in (0, 4096, NUM_ROWS - 7):
        one = read[number]
        assert one == table[number]
        np.testing.assert_allclose(one["fc/value"], scores[number], rtol=1e-5)
        assert one["fc/id"] == int(scores[number].argmax())
        assert one["fc/top_k"] == scores[number].topk(2).indices.tolist()
        np.testing.assert_allclose(
            one["fc/top_k_prob"], scores[number].softmax(0).topk(2).values, rtol=1e-5
        )
        np.testing.assert_allclose(one["emb/value"], steps[number], rtol=1e-5)
    infer(tmp_path / "csv", trained, format="csv", outputs=["fc"], fields=["value", "id"])
    with (tmp_path / "csv" / "artifacts" / "outputs.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    assert list(cells[0]) == ["row", "fc/value/0", "fc/value/1", "fc/id"]
    found = [[float(row[f"fc/value/{place}"]) for place in (0, 1)] for row in cells]
    np.testing.assert_allclose(found, scores, rtol=1e-5)


def test_another_attempt_computes_only_what_is_not_stored(
    trained: Trained, known: tuple[Tensor, list[Tensor]], tmp_path: Path
):
    infer(tmp_path / "first", trained, outputs=["fc"], fields=["value"])
    stored = {path.name: str(path) for path in (tmp_path / "first" / "parts").iterdir()}
    assert sorted(stored) == [PLAN.name(number) for number in range(3)]
    # the second part is damaged, the third is gone: the first alone has the marked values
    first, second = (Path(stored[PLAN.name(number)]) for number in (0, 1))
    with pa.ipc.open_file(first) as file:
        table, schema = file.read_all(), file.schema
    marked = table.set_column(1, "fc/value", pa.array([[7.0, 8.0]] * len(table), schema.types[1]))
    with pa.ipc.new_file(first, schema) as writer:
        for batch in marked.to_batches():
            writer.write_batch(batch)
    second.write_bytes(second.read_bytes()[:-100])
    del stored[PLAN.name(2)]
    records = infer(tmp_path / "again", trained, stored, outputs=["fc"], fields=["value"])
    found = load_file(tmp_path / "again" / "artifacts" / "outputs.safetensors")["fc/value"]
    end = PLAN.batches(0).stop * BATCH
    assert (found[:end] == torch.tensor([7.0, 8.0])).all()
    torch.testing.assert_close(found[end:], known[0][end:])
    told = [item["name"] for item in of_type(records, "artifact")]
    assert told == [PLAN.name(1), PLAN.name(2), "outputs.safetensors"]
    assert of_type(records, "artifacts_removed")[0]["names"] == [PLAN.name(n) for n in range(3)]


def test_parts_of_another_plan_are_not_taken(trained: Trained, tmp_path: Path):
    infer(tmp_path, trained, outputs=["fc"], fields=["value"])
    part = tmp_path / "parts" / PLAN.name(0)
    assert Part.read(part, PLAN.mark(0)) is not None
    assert Part.read(part, PLAN.mark(1)) is None
    assert Part.read(part, Plan(NUM_ROWS, BATCH + 1).mark(0)) is None
    assert Part.read(part, Plan(NUM_ROWS - 1, BATCH).mark(0)) is None
    assert Part.read(tmp_path / "gone", PLAN.mark(0)) is None


@pytest.mark.parametrize("ending", ["safetensors", "parquet"])
def test_several_processes_give_the_file_of_one(
    trained: Trained, forks: ForkServerClient, tmp_path: Path, ending: str
):
    asked = {"outputs": ["emb", "fc"], "format": ending}
    infer(tmp_path / "one", trained, **asked)
    resolved, checkpoint, table = trained
    spec = spec_of(parallel={"processes": 2, "strategy": "data"}, **asked)
    resolved_spec = planned(spec, meta_of(table), network=resolved)["spec"]
    more = {"trained_by": resolved, "checkpoint": {"dir": str(checkpoint)}}
    ranks = start_resolved(forks, tmp_path / "two", resolved_spec, table, **more)
    both_records = finish(ranks, tmp_path / "two")
    assert [found[-1]["state"] for found in both_records] == ["succeeded"] * 2, both_records
    assert [record["type"] for record in both_records[1]] == ["end"]
    records = both_records[0]
    both = [tmp_path / name / "artifacts" / f"outputs.{ending}" for name in ("one", "two")]
    assert both[0].read_bytes() == both[1].read_bytes()
    names = [item["name"] for item in of_type(records, "artifact")]
    assert names[:3] == [PLAN.name(number) for number in range(3)]
    own = {path.name for path in (tmp_path / "two" / "parts").iterdir()}
    assert own == {PLAN.name(0), PLAN.name(2)}  # the second is the other process's


def test_rows_that_do_not_fit_are_listed_and_the_others_keep_their_numbers(
    trained: Trained, known: tuple[Tensor, list[Tensor]], tmp_path: Path
):
    resolved, checkpoint, _ = trained
    bad = (5, 4200, NUM_ROWS - 1)
    rows = [{"ids": [1, 10] if row in bad else ids_of(row)} for row in range(NUM_ROWS)]
    table = write_ragged(tmp_path / "data", rows)
    there = (resolved, checkpoint, table)
    data = {"on_bad_row": "drop"}
    records = infer(tmp_path / "a", there, data=data, outputs=["fc"], fields=["value"])
    good = [row for row in range(NUM_ROWS) if row not in bad]
    found = load_file(tmp_path / "a" / "artifacts" / "outputs.safetensors")
    assert found["row"].tolist() == good
    torch.testing.assert_close(found["fc/value"], known[0][good])
    listed = (tmp_path / "a" / "artifacts" / "bad_rows.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in listed]
    assert [item["row"] for item in told] == list(bad)
    assert "row 4200 of split 'all' has 10 as value 1 of column 'ids'" in told[1]["error"]
    (dropped,) = of_type(records, "dropped")
    assert dropped["count"] == 3
    infer(tmp_path / "b", there, data=data, outputs=["fc"], format="csv", fields=["id"])
    with (tmp_path / "b" / "artifacts" / "outputs.csv").open(newline="") as file:
        assert [int(row["row"]) for row in csv.DictReader(file)] == good


def test_a_part_that_grows_large_is_not_held_in_memory(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    infer(tmp_path / "a", trained, outputs=["emb", "fc"])
    monkeypatch.setattr(parts, "MAX_HELD_BYTES", 1000)
    monkeypatch.setattr(parts, "MIN_ROWS", NUM_ROWS)
    infer(tmp_path / "b", trained, outputs=["emb", "fc"])
    assert len([*(tmp_path / "b" / "parts").iterdir()]) == 1
    both = [tmp_path / name / "artifacts" / "outputs.safetensors" for name in ("a", "b")]
    assert both[0].read_bytes() == both[1].read_bytes()


def test_joined_blocks_have_the_same_rows():
    generator = torch.Generator().manual_seed(1)
    blocks: list[Block] = []
    for first in range(0, 70, 7):
        lengths = torch.randint(0, 4, (7,), generator=generator)
        steps = Column(torch.rand(int(lengths.sum()), 3, generator=generator), lengths)
        columns = {"a/value": Column(torch.rand(7, 2, generator=generator)), "b/value": steps}
        blocks.append(Block(torch.arange(first, first + 7), columns))
    for num_bytes, count in ((1, 10), (2**20, 1), (blocks[0].num_bytes + 1, None)):
        found = [*joined(blocks, num_bytes)]
        assert len(found) == count or (count is None and 1 < len(found) < 10)
        assert torch.cat([block.rows for block in found]).tolist() == [*range(70)]
        for name in ("a/value", "b/value"):
            rows = [row for block in found for row in block.columns[name].by_row()]
            expected = [row for block in blocks for row in block.columns[name].by_row()]
            assert [row.tolist() for row in rows] == [row.tolist() for row in expected]


def test_the_plan_counts_rows_as_stored_and_batches_as_the_network_takes_them():
    """Two copies of the rows of a batch, and three converted batches."""
    meta = {
        "columns": [{"name": "image", "dtype": "uint8", "shape": [1, 8, 8], "file": "0.npy"},
                    {"name": "label", "dtype": "int64", "shape": [], "file": "1.npy"}],
        "splits": {"train": 10_000_000, "test": 97},
    }  # fmt: skip
    resolved = planned(cnn_job(), meta)["spec"]
    data = {"dataset": "ds_1", "split": "train", "batch_size": 100}
    asked = {"kind": "infer", "job": "job_x", "data": data}
    assert memory_of(asked, meta, resolved) == 100 * (2 * 64 + 3 * 4 * 64)
    data["split"] = "test"
    assert memory_of(asked, meta, resolved) == 97 * (2 * 64 + 3 * 4 * 64)
    asked = {"kind": "evaluate", "job": "job_x", "data": data | {"batch_size": 10}}
    assert memory_of(asked, meta, resolved) == 10 * (2 * (64 + 8) + 3 * (4 * 64 + 8))
    asked["data"]["fraction"] = [0, 0.5]
    whole, part = 8 * 97, 16 * 48  # all row numbers in their random order, and those taken
    assert memory_of(asked, meta, resolved) == 10 * (2 * 72 + 3 * 264) + whole + part


def memory_of(spec: dict[str, Any], meta: dict[str, Any], network: dict[str, Any]) -> int:
    return planned(spec, meta, network=network)["memory"]["data_bytes"]


def test_a_plan_covers_every_row_once():
    for num_rows in (1, 99, 4096, 4097, 100_000, 3_000_001):
        for batch_size in (1, 7, 256, 5000):
            plan = Plan(num_rows, batch_size)
            batches = [n for part in range(plan.num_parts) for n in plan.batches(part)]
            assert batches == list(range(plan.num_batches))
            assert sum(plan.rows_of(part) for part in range(plan.num_parts)) == num_rows
            assert plan.num_parts <= 256


BAD = {
    "more classes than there are": ({"fields": ["top_k"], "top_k": 3}, "/top_k", "at most 2"),
    "the size of a field that is not named": (
        {"fields": ["id"], "top_k": 2}, "/top_k", 'add "top_k" to fields'),
    "cells for steps": ({"outputs": ["emb"], "format": "csv"}, "/format", "set jsonl, parquet"),
    "rows of all layers below each other": (
        {"format": "jsonl", "flatten": {"axis": 0}}, "/flatten/axis", "joins the rows"),
    "layers beside each other": (
        {"format": "parquet", "flatten": {"axis": 1}}, "/flatten", "beside each other anyway"),
    "packed rows": (
        {"format": "parquet", "sequence_layout": "packed"}, "/sequence_layout", "change nothing"),
    "a divided network": ({"parallel": {"fsdp": 2}}, "/parallel", "set strategy to data"),
    "a pipeline's option": (
        {"parallel": {"processes": 2, "strategy": "data", "micro_batches": 4}},
        "/parallel/micro_batches", "remove micro_batches"),
    "processes without a number": (
        {"parallel": {"strategy": "data"}}, "/parallel/processes", "set parallel.processes"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(trained: Trained, case: str):
    changes, pointer, says = BAD[case]
    found = errors(spec_of(**changes), meta_of(trained[2]), network=trained[0])
    assert pointer in found, found
    assert says in found[pointer]


def test_several_processes_need_a_dataset(trained: Trained):
    spec = {"kind": "infer", "job": "job_x", "inputs": {"ids": [[1]]}}
    spec["parallel"] = {"processes": 2, "strategy": "data"}
    found = errors(spec, meta_of(trained[2]), network=trained[0])
    assert "remove parallel" in found["/parallel/processes"]


@pytest.mark.parametrize("field", ["id", "prob", "top_k"])
def test_fields_of_other_widths_are_not_joined_below_each_other(trained: Trained, field: str):
    """Of the steps of a row each has an index, of the whole row only one."""
    asked = {"outputs": ["emb", "fc"], "fields": [field], "flatten": {"axis": 0}}
    found = errors(spec_of(**asked), meta_of(trained[2]), network=trained[0])
    assert f"to join {field} below each other" in found["/flatten/axis"]


def test_a_tensor_whose_blocks_do_not_make_it_up_is_not_written(tmp_path: Path):
    whole = Whole(torch.float32, (3, 2), partial(iter, [torch.zeros(2, 2)]))
    with (
        (tmp_path / "x").open("wb") as file,
        pytest.raises(RuntimeError, match=r"blocks of 16 bytes .* \[3, 2\], which has 24"),
    ):
        whole.write(file)
