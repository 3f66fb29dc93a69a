import math
from pathlib import Path
from typing import Any

import pytest

from models.artifacts import LocalArtifacts
from models.attempts import Claim
from worker.shipping import BadRecord, Shipment, Sorter

AT = "2026-01-02T03:04:05.678Z"


def sort(path: Path, *records: dict[str, Any]) -> tuple[Sorter, Shipment]:
    sorter = Sorter(Claim("job_1", 2, 3), "ada", path)
    return sorter, sorter.sort([{"at": AT, **record} for record in records], (0, 1))


def metrics(step: int, **values: Any) -> dict[str, Any]:
    return {"type": "metrics", "step": step, "epoch": 0, "values": values}


def test_the_summary_has_last_least_and_greatest(tmp_path: Path):
    records = [metrics(n, loss=loss) for n, loss in enumerate([0.5, 0.2, 0.9, 0.4])]
    _, shipment = sort(tmp_path, *records)
    expected = {"last": 0.4, "min": 0.2, "min_step": 1, "max": 0.9, "max_step": 2}
    assert shipment.batch.job["summary"] == {"loss": expected}


def test_a_loss_that_is_not_finite_is_last_and_neither_least_nor_greatest(tmp_path: Path):
    _, shipment = sort(tmp_path, metrics(0, loss=1.0), metrics(1, loss="NaN"))
    entry = shipment.batch.job["summary"]["loss"]
    assert math.isnan(entry["last"])
    assert (entry["min"], entry["max"]) == (1.0, 1.0)
    assert shipment.batch.events[1].payload["values"] == {"loss": "NaN"}


def test_the_time_of_an_event_is_the_ranks(tmp_path: Path):
    _, shipment = sort(tmp_path, metrics(0, loss=1.0))
    assert shipment.batch.events[0].at.isoformat() == "2026-01-02T03:04:05.678000+00:00"


def test_files_are_moved_under_keys_that_the_worker_makes(tmp_path: Path):
    work, store = tmp_path / "work", LocalArtifacts(tmp_path / "store")
    (work / "captures").mkdir(parents=True)
    (work / "captures/0.safetensors").write_bytes(b"bytes")
    record = {"step": 1, "layer": "a/b", "kind": "output", "phase": "train", "shape": [1]}
    record |= {"type": "capture", "dtype": "float32", "size_bytes": 5}
    _, shipment = sort(work, record | {"file": "captures/0.safetensors"})
    shipment.move_files(store)
    (row,) = shipment.batch.captures
    assert row["key"].startswith("jobs/job_1/2/captures/cap_")
    assert store.local(row["key"]).read_bytes() == b"bytes"
    href = shipment.batch.events[0].payload["href"]
    assert href == "/api/v1/jobs/job_1/layers/a%2Fb/output?step=1"


def test_histograms_and_quantiles_are_in_the_event(tmp_path: Path):
    record = {"type": "stats", "step": 1, "phase": "train", "rows": []}
    names = ["fc", "output"]
    more = {"histograms": [[*names, [0, 5], [3, 1]]], "quantiles": [[*names, *range(7)]]}
    _, shipment = sort(tmp_path, record, record | more)
    payloads = [event.payload for event in shipment.batch.events]
    assert payloads[0] == {key: payloads[1][key] for key in ("step", "phase", "columns", "rows")}
    assert payloads[1].items() >= more.items()
    assert shipment.batch.stats[1].items() >= more.items()


@pytest.mark.parametrize("file", ["/etc/passwd", "../other", "captures/../../x", ""])
def test_a_rank_cannot_name_a_file_outside_its_directory(tmp_path: Path, file: str):
    record = {"type": "artifact", "name": "a", "media_type": "x/y", "size_bytes": 1, "file": file}
    with pytest.raises(BadRecord):
        sort(tmp_path, record)


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".hidden", "x" * 201])
def test_an_artifact_has_a_plain_name(tmp_path: Path, name: str):
    record = {"type": "artifact", "name": name, "media_type": "x", "size_bytes": 1, "file": "f"}
    with pytest.raises(BadRecord):
        sort(tmp_path, record)


@pytest.mark.parametrize(
    "record", [{"type": "surprise"}, {"type": "metrics"}, {"type": "stats", "rows": 3}]
)
def test_what_is_no_record_is_refused_by_name(tmp_path: Path, record: dict[str, Any]):
    with pytest.raises(BadRecord, match=record["type"]):
        sort(tmp_path, record)


def test_the_end_is_kept_for_the_verdict(tmp_path: Path):
    _, shipment = sort(tmp_path, {"type": "end", "state": "failed", "error": {"code": "x"}})
    assert shipment.end == {"state": "failed", "error": {"code": "x"}}
    assert shipment.batch.events == []


def test_progress_is_the_newest_and_no_event(tmp_path: Path):
    sorter, shipment = sort(tmp_path, *({"type": "progress", "step": n} for n in range(3)))
    assert shipment.batch.job["progress"] == {"step": 2}
    assert shipment.batch.events == []
    assert sorter.step == 2


def test_what_a_rank_took_up_becomes_events_and_the_newest_revision(tmp_path: Path):
    first = {"type": "probe", "step": 3, "revision": 1}
    first["changes"] = [{"probe": "prb_1", "action": "attached"}]
    second = {"type": "probe", "step": 5, "revision": 4, "changes": []}
    _, shipment = sort(tmp_path, first, second)
    assert shipment.batch.probes == (4, 5)
    (event,) = shipment.batch.events
    assert (event.type, event.payload) == (
        "probe",
        {"probe": "prb_1", "action": "attached", "step": 3},
    )
