"""Batches of rows of like length: each against the same made by hand, row by row."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.core.spool import read_frames
from engine.data.batches.batch_counts import BatchCounts
from engine.data.batches.buckets import Buckets, TooLong, by_chance, padding_of, token_sizes
from engine.process import rank
from glasshouse.spec import BucketByLength
from tests.unit.engine.ragged import job, meta_of, texts, write_ragged
from tests.unit.engine.runs import errors, losses, of_type, planned, run, write_job

RANDOM = random.Random(5)  # noqa: S311 (rows of a test)
MANY = [
    [RANDOM.randrange(10) for _ in range(RANDOM.choice([0, 1, 2, 3, 5, 9, 17]))] for _ in range(83)
]
LENGTHS = torch.tensor([len(row) for row in MANY])


def bucketed(**options: Any) -> dict[str, Any]:
    """A job whose batches are cut by length."""
    more = options.pop("data", {})
    return job(data={"bucket_by_length": options, **more})


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return texts(tmp_path_factory.mktemp("many"), MANY)


def batches(
    order: tuple[int, int] | None = (3, 1), size: int = 8, **options: Any
) -> list[list[int]]:
    made = Buckets(BucketByLength(**options), LENGTHS, size)
    return [rows.tolist() for rows in made.epoch(order).batches()]


# --- which rows are together -----------------------------------------------------------------


def test_rows_are_drawn_sorted_by_length_cut_and_their_batches_drawn():
    """The documented rule, by hand."""
    generator = torch.Generator().manual_seed(3 * 1_000_003 + 1)
    drawn = torch.randperm(83, generator=generator).tolist()
    ranked = sorted(drawn[:80], key=lambda row: len(MANY[row]))
    cut = [ranked[i : i + 8] for i in range(0, 80, 8)]
    expected = [cut[i] for i in torch.randperm(10, generator=generator)] + [drawn[80:]]
    assert batches() == expected


def test_every_epoch_has_every_row_once_and_its_own_batches():
    for options in ({}, {"width": 4}, {"max_tokens": 40}, {"max_tokens": 40, "width": 3}):
        epochs = [batches((3, epoch), **options) for epoch in range(3)]
        for made in epochs:
            assert sorted(row for rows in made for row in rows) == [*range(83)]
        assert len({len(made) for made in epochs}) == 1
        assert len({json.dumps(sorted(sorted(rows) for rows in made)) for made in epochs}) == 3


def test_without_shuffling_rows_come_from_short_to_long():
    lengths = [len(MANY[row]) for rows in batches(None)[:-1] for row in rows]
    assert lengths == sorted(lengths)
    assert batches(None) == batches(None)
    ranked = sorted(range(83), key=lambda row: len(MANY[row]))
    assert [row for rows in batches(None, max_tokens=30) for row in rows] == ranked


def test_drop_last_leaves_out_rows_of_any_length():
    made = Buckets(BucketByLength(), LENGTHS, 8, drop_last=True)
    left = [
        set(range(83)) - {*cut.rows.tolist()} for cut in (made.epoch((1, e)) for e in range(40))
    ]
    assert all(len(rows) == 3 for rows in left)
    assert {len(MANY[row]) for rows in left for row in rows} == {0, 1, 2, 3, 5, 9, 17}


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("max_tokens", [17, 20, 40, 500])
def test_a_batch_of_tokens_takes_rows_until_one_more_would_be_too_many(max_tokens, width):
    keys = {row: math.ceil(len(MANY[row]) / width) for row in range(83)}
    longest = {k: max(len(MANY[row]) for row in keys if keys[row] == k) for k in keys.values()}
    expected, size = [], 0
    for row in sorted(range(83), key=lambda row: keys[row]):
        room = min(8, max_tokens // max(1, longest[keys[row]]))
        if size >= room:
            expected.append(size)
            size = 0
        size += 1
    made = batches(None, max_tokens=max_tokens, width=width)
    assert [len(rows) for rows in made] == [*expected, size]
    for rows in batches((3, 2), max_tokens=max_tokens, width=width):
        assert len(rows) * max(len(MANY[row]) for row in rows) <= max_tokens


def test_a_row_that_is_longer_than_a_batch_may_be_is_an_error():
    with pytest.raises(TooLong):
        Buckets(BucketByLength(max_tokens=16), LENGTHS, 8)


def test_the_number_of_batches_follows_from_how_many_rows_have_each_length():
    lengths, rows = np.unique(LENGTHS.numpy(), return_counts=True)
    for options in ({"max_tokens": 25}, {"max_tokens": 60, "width": 4}):
        wanted = BucketByLength(**options)
        assert len(token_sizes(wanted, lengths, rows, 8)) == len(batches(**options))


# --- in a training ---------------------------------------------------------------------------


def shown(table: Path, directory: Path, spec: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    return run(directory, spec, table), planned(spec, meta_of(table))


def test_training_makes_the_steps_that_the_plan_says_and_reports_their_padding(many, tmp_path):
    for number, options in enumerate(({}, {"max_tokens": 40}, {"max_tokens": 60, "width": 5})):
        spec = bucketed(**options, data={"batch_size": 8})
        records, plan = shown(many, tmp_path / str(number), spec)
        assert len(losses(records)) == plan["num_steps"] == 3 * len(batches(**options))
        told = [
            item["values"]["padding/ids"]
            for item in of_type(records, "metrics")
            if "loss" in item["values"]
        ]
        expected = []
        for epoch in range(3):
            for rows in batches((3, epoch), **options):
                lengths = [len(MANY[row]) for row in rows]
                expected.append(1 - sum(lengths) / (len(lengths) * max(1, *lengths)))
        assert told == pytest.approx(expected)


def test_the_loss_of_a_step_counts_each_row_of_its_batches_alike(many, tmp_path):
    """Batches of many sizes, three to a step: against the loss of each row by itself."""
    still = {"optimizer": {"type": "SGD", "args": {"lr": 0.0}}, "stop": {"epochs": 1}}
    alone = job(**still, data={"batch_size": 1, "shuffle": {"enabled": False}})
    each = losses(run(tmp_path / "alone", alone, many))
    spec = bucketed(max_tokens=30, data={"batch_size": 8}) | still | {"accumulate": 3}
    found = losses(run(tmp_path / "steps", spec, many))
    made = batches((3, 0), max_tokens=30)
    groups = [[row for rows in made[i : i + 3] for row in rows] for i in range(0, len(made), 3)]
    expected = [sum(each[row] for row in rows) / len(rows) for rows in groups]
    assert found == pytest.approx(expected, rel=1e-5)
    assert planned(spec, meta_of(many))["num_steps"] == len(groups)


KINDS: dict[str, dict[str, Any]] = {
    "of one size": {"bucket_by_length": {}},
    "of tokens": {"bucket_by_length": {"max_tokens": 30, "width": 2}},
    "in order": {"bucket_by_length": {}, "shuffle": {"enabled": False}},
    "whole ones": {"bucket_by_length": {"width": 3}, "drop_last": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.long
def test_a_run_that_was_stopped_within_an_epoch_resumes_bit_for_bit(
    many, tmp_path, kind, accumulate
):
    spec = job(
        data={"batch_size": 8, **KINDS[kind]},
        accumulate=accumulate,
        checkpoint={"every_steps": 1},
        stop={"epochs": 2},
    )
    records = run(tmp_path / "whole", spec, many)
    for step in (2, len(losses(records)) // 2, len(losses(records)) - 2):
        there = {"dir": str(tmp_path / "whole" / "checkpoints" / f"step-{step}"), "step": step}
        resumed = run(tmp_path / f"{step}", spec, many, resume=there)
        assert losses(resumed) == losses(records)[step:]


def failure(directory: Path, spec: dict[str, Any], table: Path, **more: Any) -> dict[str, Any]:
    write_job(directory, planned(spec, meta_of(table))["spec"], table, **more)
    assert rank.main(directory) == 0
    records, _ = read_frames(directory / "spool", 0, 10**6)
    assert records[-1]["state"] == "failed"
    return records[-1]["error"]


def test_a_checkpoint_whose_batches_were_others_is_refused(many, tmp_path, capfd):
    plain = job(data={"batch_size": 8}, checkpoint={"every_steps": 1})
    sorted_ = bucketed(data={"batch_size": 8}) | {"checkpoint": {"every_steps": 1}}
    for number, (one, other) in enumerate(((plain, sorted_), (sorted_, plain))):
        run(tmp_path / f"a{number}", one, many)
        there = {"dir": str(tmp_path / f"a{number}" / "checkpoints" / "step-3"), "step": 3}
        error = failure(tmp_path / f"b{number}", other, many, resume=there)
        assert error["code"] == "checkpoint_mismatch"
        assert "bucket_by_length" in error["message"]
    capfd.readouterr()


def test_a_row_that_is_too_long_is_named(many, tmp_path, capfd):
    """A part of a split: which of its rows are taken is not known to the plan."""
    spec = bucketed(max_tokens=16, data={"train": {"dataset": "ds_1", "fraction": [0, 0.9]}})
    error = failure(tmp_path, spec, many)
    assert error["code"] == "data_failed"
    row = int(error["message"].split()[1])
    assert len(MANY[row]) == 17
    assert "max_tokens" in error["message"]
    capfd.readouterr()


# --- the plan --------------------------------------------------------------------------------


def by_closed_form(lengths: list[int], size: int) -> float:
    """The padding of random batches: the mean of the longest of ``size`` rows, without a draw."""
    total, num = sum(lengths), len(lengths)

    def places(size: int) -> float:
        none_longer = [
            math.comb(sum(n <= length for n in lengths), size) / math.comb(num, size)
            for length in range(max(lengths) + 1)
        ]
        steps = zip(none_longer, [0.0, *none_longer], strict=False)
        return size * sum(max(1, i) * (p - q) for i, (p, q) in enumerate(steps))

    whole, rest = divmod(num, size)
    return 1 - total / (whole * places(size) + (places(rest) if rest else 0))


def test_the_plan_reports_lengths_and_padding(tmp_path):
    rows = [[1] * RANDOM.randrange(1, 60) for _ in range(1500)]
    table = texts(tmp_path, rows)
    lengths = [len(row) for row in rows]
    found = planned(job(data={"batch_size": 20}), meta_of(table))["sequences"]["ids"]
    mean = pytest.approx(sum(lengths) / 1500, abs=1e-3)
    assert found["lengths"] == {"min": min(lengths), "mean": mean, "max": max(lengths)}
    assert found["padding"] == pytest.approx(by_closed_form(lengths, 20), abs=0.01)
    assert "by_chance" not in found
    for options in ({}, {"max_tokens": 600}, {"width": 8}):
        spec = bucketed(**options, data={"batch_size": 20})
        sorted_ = planned(spec, meta_of(table))["sequences"]["ids"]
        assert sorted_["by_chance"] == found["padding"]
        made = Buckets(BucketByLength(**options), torch.tensor(lengths), 20)
        by_hand = padding_of(torch.tensor(lengths), made.epoch((8, 2)))
        assert sorted_["padding"] == pytest.approx(by_hand, abs=0.01)
        assert sorted_["padding"] < found["padding"] / 4


def test_padding_is_what_is_not_a_step_of_a_row():
    cut = by_chance(83, 8, (1, 0))
    places = sum(len(rows) * max(1, *(len(MANY[i]) for i in rows)) for rows in cut.batches())
    assert padding_of(LENGTHS, cut) == pytest.approx(1 - sum(map(len, MANY)) / places)


def test_the_plan_takes_a_batch_of_the_longest_rows(many):
    spec = bucketed(max_tokens=40, data={"batch_size": 8})
    plan = planned(spec, meta_of(many))
    plain = planned(job(data={"batch_size": 8}), meta_of(many))
    few, many_rows = (item["memory"]["activations_bytes"] for item in (plan, plain))
    assert few * 4 == pytest.approx(many_rows, rel=0.1)  # 2 rows, not 8


def test_the_plan_knows_no_number_of_steps_where_it_cannot(many):
    part = {"train": {"dataset": "ds_1", "fraction": [0, 0.5]}, "batch_size": 8}
    plan = planned(bucketed(max_tokens=40, data=part), meta_of(many))
    assert plan["num_steps"] is None
    assert "/data/bucket_by_length/max_tokens" in [w["pointer"] for w in plan["warnings"]]
    spec = bucketed(max_tokens=40, data=part) | {"stop": {"steps": 7}}
    assert planned(spec, meta_of(many))["num_steps"] == 7
    old = meta_of(many)
    for column in old["columns"]:
        column.pop("length_counts", None)
    assert planned(bucketed(max_tokens=40), old)["num_steps"] is None
    assert planned(bucketed(), old)["num_steps"] == 3 * 17
    assert planned(bucketed(), old)["sequences"]["ids"]["padding"] is None


def test_a_length_limit_counts_before_batches_are_cut(many, tmp_path):
    for overflow in ("truncate", "drop"):
        limit = {"sequence": {"max_length": 9, "overflow": overflow}, "batch_size": 8}
        spec = bucketed(max_tokens=20, data=limit)
        records, plan = shown(many, tmp_path / overflow, spec)
        assert len(losses(records)) == plan["num_steps"]


def test_a_schedule_of_epochs_knows_how_long_they_are(many):
    spec = bucketed(max_tokens=40, data={"batch_size": 8})
    steps = planned(spec, meta_of(many))["num_steps"]
    spec["scheduler"] = {"type": "CosineAnnealingLR"}
    resolved = planned(spec, meta_of(many))["spec"]
    assert resolved["scheduler"]["args"]["T_max"] == steps
    spec["scheduler"] = {"type": "CosineAnnealingLR", "unit": "samples"}
    assert planned(spec, meta_of(many))["spec"]["scheduler"]["args"]["T_max"] == 3 * 83
    assert BatchCounts(83, 8, num_batches=20).length(job_stop(steps=5), "samples") is None
    assert BatchCounts(83, 8, num_batches=20).length(job_stop(steps=41), "epochs") == 3


def job_stop(**given: Any) -> Any:
    from glasshouse.spec import Stop

    return Stop(**given)


REFUSED = {
    "no sequence": ({"field": "label"}, "/data/bucket_by_length/field", "no field whose rows"),
    "no such field": ({"field": "text"}, "/data/bucket_by_length/field", "'text'"),
    "too long": ({"max_tokens": 16}, "/data/bucket_by_length/max_tokens", "raise max_tokens"),
    "no width": ({"width": 0}, "/data/bucket_by_length/width", "at least 1"),
    "unknown": ({"boundaries": [1]}, "/data/bucket_by_length/boundaries", ""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_option_is_refused_with_its_place(many, case):
    options, pointer, word = REFUSED[case]
    assert word in errors(bucketed(**options), meta_of(many))[pointer]


def test_a_field_must_be_named_where_there_are_several(tmp_path):
    table = texts(tmp_path)
    fields = {
        "ids": {"type": "integer_sequence", "dim": 10},
        "steps": {"type": "dense_sequence", "dim": 2},
        "label": {"type": "integer", "dim": 2},
    }
    found = errors(bucketed(data={"fields": fields}), meta_of(table))
    assert "name the field" in found["/data/bucket_by_length"]
    plan = planned(bucketed(field="ids", data={"fields": fields}), meta_of(table))
    assert plan["sequences"]["steps"]["padding"] is None
    assert plan["sequences"]["ids"]["padding"] is not None


def test_drop_last_does_not_go_with_tokens(many):
    found = errors(bucketed(max_tokens=40, data={"drop_last": True}), meta_of(many))
    assert "drop_last" in " ".join(found.values())


def test_a_table_without_sequences_has_nothing_to_sort_by(tmp_path):
    table = write_ragged(tmp_path, [{"x": 1.0, "label": 0}, {"x": 2.0, "label": 1}])
    fields = {"x": {"type": "dense"}, "label": {"type": "integer", "dim": 2}}
    layers = [{"name": "fc", "type": "Linear", "args": {"out_features": 2}, "inputs": ["x"]}]
    spec = bucketed(data={"fields": fields}) | {"network": {"layers": layers}}
    assert "no field is a sequence" in errors(spec, meta_of(table))["/data/bucket_by_length"]
