import errno
import math
import time
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load

from engine.probes.tensors.ring import HEADER_BYTES, Ring
from glasshouse import jsonio
from glasshouse.events import parse_event
from glasshouse.ids import new_id
from models.jobs.leases import Claim
from models.observations.probes import ProbeChange
from models.storage.artifacts import LocalArtifacts
from tests.waiting import until
from worker.attempt.captures import CapturedTensors, Drain
from worker.attempt.records import BadRecord, Shipment, Sorter

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


def test_a_loss_that_is_nan_or_inf_is_last_and_neither_least_nor_greatest(tmp_path: Path):
    _, shipment = sort(tmp_path, metrics(0, loss=1.0), metrics(1, loss="NaN"))
    entry = shipment.batch.job["summary"]["loss"]
    assert math.isnan(entry["last"])
    assert (entry["min"], entry["max"]) == (1.0, 1.0)
    assert shipment.batch.events[1].payload["values"] == {"loss": "NaN"}


def test_the_time_of_an_event_is_the_ranks(tmp_path: Path):
    _, shipment = sort(tmp_path, metrics(0, loss=1.0))
    assert shipment.batch.events[0].at.isoformat() == "2026-01-02T03:04:05.678000+00:00"


def test_webhooks_hear_of_drift_and_of_the_first_nan_of_an_attempt(tmp_path: Path):
    nan = {"type": "finding", "rule": "nonfinite", "causes": [], "layer": None, "tensor": None}
    nan |= {"kind": None, "phase": None, "tensors": {"rows": []}}
    drift = {"type": "finding", "rule": "drift", "model": "m", "version": 1, "rows": 100}
    _, shipment = sort(tmp_path, nan | {"step": 3}, nan | {"step": 4}, drift, drift)
    found = [(event.step, event.announce) for event in shipment.batch.events]
    assert found == [(3, True), (4, False), (None, True), (None, True)]
    assert shipment.batch.events[2].payload == {
        key: value for key, value in drift.items() if key != "type"
    }
    _, shipment = sort(tmp_path, {"type": "drift", "versions": [{"model": "m"}]})
    assert shipment.batch.replica == {"drift": [{"model": "m"}]}


def test_requests_of_a_file_are_stored_and_those_of_a_damaged_one_counted(tmp_path: Path):
    request = {"id": new_id("rec"), "at": AT, "model": "m", "version": 3, "status": 429}
    line = jsonio.dumps(request | {"code": "queue_full", "details": "{}"}).encode()
    record: dict[str, Any] = {"type": "requests", "count": 2, "crc32": zlib.crc32(line * 2)}
    (tmp_path / "damaged").write_bytes(line)
    (tmp_path / "whole").write_bytes(line)
    whole = {**record, "file": "whole", "count": 1, "crc32": zlib.crc32(line)}
    files = [whole, {**record, "file": "damaged"}, {**record, "file": "gone"}]
    _, shipment = sort(tmp_path, *files)
    (stored,) = shipment.batch.requests
    assert stored.pop("at").isoformat() == "2026-01-02T03:04:05.678000+00:00"
    assert stored == {key: request[key] for key in ("id", "model", "version", "status")} | {
        "code": "queue_full",
        "details": "{}",
    }
    lost = [event.payload for event in shipment.batch.events]
    assert [one["count"] for one in lost] == [2, 2]
    assert [one["what"] for one in lost] == [
        "request log: the file is damaged",
        "request log: No such file or directory",
    ]
    assert [path.name for path in shipment.read_files] == ["whole", "damaged", "gone"]
    with pytest.raises(BadRecord):
        sort(tmp_path, {**record, "file": "../whole"})


TENSORS = [
    {"layer": layer, "kind": "output", "shape": [2], "dtype": "uint8", "size_bytes": 2}
    for layer in ("a/b", "c")
]


def test_files_are_moved_under_keys_that_the_worker_makes(tmp_path: Path):
    work, store = tmp_path / "work", LocalArtifacts(tmp_path / "store")
    (work / "captures").mkdir(parents=True)
    (work / "captures/0.safetensors").write_bytes(b"bytes")
    entries = [{**entry, "tensor": f"{entry['layer']}/output"} for entry in TENSORS]
    record = {"type": "captures", "step": 1, "phase": "train", "tensors": entries}
    _, shipment = sort(work, record | {"file": "captures/0.safetensors"})
    shipment.move_files(store)
    first, second = shipment.batch.captures
    assert first["key"] == second["key"]
    assert first["key"].startswith("jobs/job_1/2/captures/cap_")
    assert [first["tensor"], second["tensor"]] == ["a/b/output", "c/output"]
    assert store.local(first["key"]).read_bytes() == b"bytes"
    event = shipment.batch.events[0].payload
    assert event["href"] == "/api/v1/jobs/job_1/layers/a%2Fb/output?step=1"
    assert event["capture"] == first["id"]


def test_tensors_in_the_ring_wait_for_their_file(tmp_path: Path):
    entries = [{**entry, "position": 64 * n} for n, entry in enumerate(TENSORS)]
    record = {"type": "captures", "step": 1, "phase": "train", "tensors": entries, "end": 66}
    _, shipment = sort(tmp_path, record)
    assert (shipment.batch.captures, shipment.batch.events) == ([], [])
    store = LocalArtifacts(tmp_path / "store")
    ring = Ring.private(4096)
    ring.memory[HEADER_BYTES : HEADER_BYTES + 2] = b"ab"
    ring.memory[HEADER_BYTES + 64 : HEADER_BYTES + 66] = b"cd"
    drain = Drain(Claim("job_1", 2, 3), store, ring)
    for waiting in shipment.tensors:
        drain.take(waiting)
    lots = finished(drain)
    assert drain.idle
    assert ring.released == 0, "the database does not have the rows yet"
    shipment.take(lots)
    drain.release(lots)
    assert ring.released == 66
    (key,) = {row["key"] for row in shipment.batch.captures}
    kept = load(store.local(key).read_bytes())
    assert {name: value.tobytes() for name, value in kept.items()} == {
        "a/b/output": b"ab",
        "c/output": b"cd",
    }
    drain.close()


def finished(drain: Drain) -> list[CapturedTensors]:
    return until(drain.finished)


@pytest.mark.parametrize("change", [{"position": 4095}, {"size_bytes": "2"}, {"dtype": "letters"}])
def test_a_record_that_names_nothing_in_the_ring_is_refused(tmp_path: Path, change: dict[str, Any]):
    drain = Drain(Claim("job_1", 2, 3), LocalArtifacts(tmp_path), Ring.private(4096))
    entry = {**TENSORS[1], "position": 0, **change}
    drain.take({"at": AT, "step": 1, "phase": "train", "tensors": [entry], "end": 4})
    with pytest.raises(BadRecord):
        finished(drain)
    drain.close()


class Full(LocalArtifacts):
    """A disk that is full for a while."""

    num_refused = 0

    @contextmanager
    def receive(self, key: str) -> Generator[Path]:
        if self.num_refused:
            self.num_refused -= 1
            raise OSError(errno.ENOSPC, "full")
        with super().receive(key) as path:
            yield path


def lot_of(store: Full, tmp_path: Path, *, abandoned: bool) -> CapturedTensors:
    drain = Drain(Claim("job_1", 2, 3), store, Ring.private(4096))
    entries = [{**entry, "position": 64 * n} for n, entry in enumerate(TENSORS)]
    drain.take({"at": AT, "step": 1, "phase": "train", "tensors": entries, "end": 66})
    if abandoned:
        deadline = time.monotonic() + 10
        while drain.stuck_for_s() < 0.05 and time.monotonic() < deadline:
            time.sleep(0.005)
        drain.abandon()
    (lot,) = finished(drain)
    drain.close()
    return lot


def test_a_full_disk_is_waited_for(tmp_path: Path):
    store = Full(tmp_path)
    store.num_refused = 1
    assert len(lot_of(store, tmp_path, abandoned=False).captures) == 2


def test_what_there_is_no_time_for_is_dropped_and_counted(tmp_path: Path):
    store = Full(tmp_path)
    store.num_refused = 10**6
    lot = lot_of(store, tmp_path, abandoned=True)
    assert (lot.captures, lot.end) == ([], 66)
    (event,) = lot.events
    assert (event.type, event.payload["count"]) == ("dropped", 2)


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
def test_an_invalid_record_is_refused_by_name(tmp_path: Path, record: dict[str, Any]):
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


def test_changes_that_a_rank_applied_become_events_and_the_newest_revision(tmp_path: Path):
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


def test_what_watching_costs_goes_to_the_job_and_its_probes(tmp_path: Path):
    attached = {"type": "probe", "step": 3, "revision": 4}
    attached["changes"] = [{"probe": "prb_1", "action": "attached"}]
    overhead = {"type": "overhead", "step": 9, "fraction": 0.02, "budget": 0.03}
    overhead |= {"unbudgeted": 0.005}
    overhead["probes"] = {"prb_1": 0.001, "0": 0.5}
    wider = {"type": "adjusted", "what": "probe prb_1.every", "probe": "prb_1", "from": 1, "to": 8}
    wider |= {"by": "max_overhead", "step": 10}
    _, shipment = sort(tmp_path, attached, overhead, wider)
    batch = shipment.batch
    assert batch.job["probe_overhead"] == {
        "fraction": 0.02,
        "budget": 0.03,
        "unbudgeted": 0.005,
    }
    assert batch.probe_changes == [
        ProbeChange("prb_1", {"cost_s": 0.001}, 4),
        ProbeChange("0", {"cost_s": 0.5}, 4),
        ProbeChange("prb_1", {"every_now": 8}, 4),
    ]
    assert [event.type for event in batch.events] == ["probe", "adjusted"]
    told = {"job": "job_1", "seq": 2, "attempt": 1, "at": AT, "type": "adjusted"}
    assert parse_event(told | batch.events[1].payload).by == "max_overhead"


def test_an_interval_that_an_attempt_before_has_widened_is_the_one_in_force(tmp_path: Path):
    overhead = {"type": "overhead", "step": 9, "fraction": 0.02, "budget": 0.03, "probes": {}}
    overhead |= {"unbudgeted": 0.0}
    _, shipment = sort(tmp_path, overhead | {"every": {"prb_1": 16}})
    assert shipment.batch.probe_changes == [ProbeChange("prb_1", {"every_now": 16}, 0)]
    assert shipment.batch.events == []


def test_a_probe_that_failed_says_so_and_takes_no_change_up(tmp_path: Path):
    problem = {"code": "probe_failed", "detail": "no"}
    failed = {"type": "probe", "step": 7, "revision": 2}
    failed["changes"] = [{"probe": "prb_1", "action": "failed", "problem": problem}]
    _, shipment = sort(tmp_path, failed)
    assert shipment.batch.probes is None
    (change,) = shipment.batch.probe_changes
    assert change == ProbeChange("prb_1", {"state": "failed", "problem": problem}, 2)
    (event,) = shipment.batch.events
    assert event.payload["action"] == "failed"
    assert event.payload["step"] == 7


def test_a_capture_of_an_evaluation_is_named_with_its_phase(tmp_path: Path):
    entry = {"layer": "fc", "kind": "output", "shape": [1], "dtype": "float32", "size_bytes": 5}
    entry |= {"form": "full", "slice": None, "captured_from": [1], "tensor": "a"}
    record = {"type": "captures", "step": 1, "phase": "evaluate", "tensors": [entry]}
    _, shipment = sort(tmp_path, record | {"file": "captures/0.safetensors"})
    assert shipment.batch.events[0].payload["href"].endswith("/output?step=1&phase=evaluate")
