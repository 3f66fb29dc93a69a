"""Looking into a job over HTTP: metrics, layers, statistics, tensors, files, logs, machines."""

import io
import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from api.rendering import tensors
from api.schemas import inspection
from engine.metrics.torch_metrics import metric_classes
from glasshouse import jsonio
from glasshouse.events import STATS_COLUMNS
from glasshouse.ids import new_id
from glasshouse.metric_direction import direction_of
from glasshouse.spec import Probe
from glasshouse.spec.metrics import OWN
from models.database import Database
from models.jobs import jobs
from models.jobs.shipments import Batch
from models.observations import probes
from models.observations.events import NewEvent
from models.observations.probes import CheckedProbe
from models.storage.artifacts import LocalArtifacts
from models.tables import now
from tests.integration.inspection import services
from tests.integration.inspection.services import Api, Writer, checked, problem

NONFINITE = [math.inf, -math.inf, math.nan]


def keep(
    writer: Writer,
    home: Path,
    layer: str,
    kind: str,
    step: int,
    array: np.ndarray,
    **more: Any,
) -> str:
    """Store a capture as the worker does."""
    name = new_id("cap")
    key = f"jobs/{writer.job.id}/1/captures/{name}.safetensors"
    with LocalArtifacts(home / "artifacts").receive(key) as path:
        path.write_bytes(b"".join(tensors.safetensors({"tensor": array}, {}).parts))
    row = {"id": name, "step": step, "layer": layer, "kind": kind, "phase": "train", "key": key}
    row |= {"shape": list(array.shape), "dtype": str(array.dtype), "size_bytes": array.nbytes}
    writer.ship(Batch(captures=[row | more]))
    return name


def stats_record(step: int, rows: list[list[Any]]) -> dict[str, Any]:
    return {"step": step, "phase": "train", "rows": rows}


def test_metrics_come_as_a_table_and_as_columns(ada: httpx2.Client, writer: Writer) -> None:
    writer.losses([3.0, 1.0, *NONFINITE, 2.0])
    path = f"/jobs/{writer.job.id}/metrics"
    loss, lr = checked(ada.get(path), inspection.MetricList)["data"]
    assert loss == {
        "name": "loss",
        "last": 2.0,
        "last_step": 5,
        "min": 1.0,
        "max": 3.0,
        "count": 6,
        "first_nonfinite_step": 2,
    }
    assert lr["first_nonfinite_step"] is None
    columns = checked(ada.get(f"{path}/query?name=loss&name=lr&from_step=1"), inspection.Columns)
    assert columns["step"] == [1, 2, 3, 4, 5]
    assert columns["values"]["loss"] == [1.0, "Infinity", "-Infinity", "NaN", 2.0]
    assert columns["values"]["lr"] == [0.1] * 5
    table = ada.get(f"{path}/query?name=loss", headers={"Accept": "text/csv"})
    assert table.headers["content-type"].startswith("text/csv")
    assert table.text.splitlines()[:4] == ["step,epoch,loss", "0,0,3.0", "1,0,1.0", "2,0,Infinity"]


def test_series_of_different_steps_share_one_axis(ada: httpx2.Client, writer: Writer) -> None:
    writer.losses([1.0, 2.0, 3.0])
    row = {"step": 1, "epoch": 7, "name": "validation/loss", "value": 9.0}
    writer.ship(Batch(metrics=[row]))
    answer = ada.get(f"/jobs/{writer.job.id}/metrics/query?name=validation/loss&name=loss")
    assert answer.json()["values"]["validation/loss"] == [None, 9.0, None]


def test_a_thinned_series_keeps_its_spikes(ada: httpx2.Client, writer: Writer) -> None:
    values = [1.0] * 3000
    values[777], values[1234], values[2222] = 50.0, -50.0, math.nan
    writer.losses(values)
    answer = ada.get(f"/jobs/{writer.job.id}/metrics/query?name=loss&max_points=50").json()
    found = dict(zip(answer["step"], answer["values"]["loss"], strict=True))
    assert len(found) < 60
    assert (found[777], found[1234], found[2222]) == (50.0, -50.0, "NaN")
    assert {0, 2999} <= set(found)


def test_an_unknown_metric_is_named(ada: httpx2.Client, writer: Writer) -> None:
    path = f"/jobs/{writer.job.id}/metrics/query"
    assert ada.get(f"{path}?name=loss").json()["step"] == []  # nothing was reported yet
    writer.losses([1.0])
    assert problem(ada.get(f"{path}?name=los")) == (404, "metric_not_found")
    image = {"Accept": "image/png"}
    assert problem(ada.get(f"{path}?name=loss", headers=image)) == (406, "not_acceptable")
    for query in ("", "?name=loss&max_points=1", "?name=loss&from_step=-1", "?name=loss&to_step=x"):
        assert problem(ada.get(path + query)) == (422, "invalid_request")


def test_what_has_not_changed_is_not_sent_again(ada: httpx2.Client, writer: Writer) -> None:
    writer.losses([1.0])
    base = f"/jobs/{writer.job.id}"
    paths = ["/metrics", "/metrics/query?name=loss", "/layers", "/stats", "/logs", "/events"]
    paths += ["/artifacts", "/checkpoints", "/plots/loss?format=svg"]
    for path in paths:
        tag = ada.get(base + path).headers["etag"]
        again = ada.get(base + path, headers={"If-None-Match": tag})
        assert (again.status_code, again.content) == (304, b""), path
        assert again.headers["etag"] == tag


def test_layers_show_their_newest_statistics(ada: httpx2.Client, writer: Writer) -> None:
    def row(name: str, kind: str, mean: float) -> list[Any]:
        return [name, kind, mean, *[0.5] * 8]

    records = [
        stats_record(0, [row("conv1", "output", 1.0), row("conv1.weight", "param", 5.0)]),
        stats_record(25, [row("conv1", "output", math.nan), row("lstm.1.0", "output", 2.0)]),
    ]
    writer.ship(Batch(stats=records))
    conv, lstm = checked(ada.get(f"/jobs/{writer.job.id}/layers"), inspection.LayerList)["data"]
    assert (conv["stats"]["output"]["step"], conv["stats"]["output"]["mean"]) == (25, "NaN")
    assert conv["tensors"]["conv1.weight"]["param"]["mean"] == 5.0
    assert lstm["stats"] == {}
    assert lstm["tensors"]["lstm.1.0"]["output"]["mean"] == 2.0


def test_statistics_come_by_glob_kind_and_figure(ada: httpx2.Client, writer: Writer) -> None:
    values = [math.nan if step == 40 else float(step % 10) for step in range(400)]
    assert len(STATS_COLUMNS) == 11
    for start in range(0, 400, 100):
        steps = range(start, start + 100)
        rows = [["conv1", "output", values[s], *[0.0] * 6, 1.0 * (s == 40), 0.0] for s in steps]
        more = [stats_record(s, [row, ["lstm.0", "output", *[0.0] * 9]]) for s, row in zip(steps, rows, strict=True)]  # fmt: skip  # noqa: E501
        writer.ship(Batch(stats=more))
    path = f"/jobs/{writer.job.id}/stats"
    (conv,) = checked(ada.get(f"{path}?layer=conv*&stat=mean,nan"), inspection.StatsList)["data"]
    assert (conv["layer"], conv["kind"], conv["phase"]) == ("conv1", "output", "train")
    assert conv["values"]["mean"] == [jsonio.named(value) for value in values]
    assert list(conv["values"]) == ["mean", "nan"]
    assert len(ada.get(path).json()["data"]) == 2
    assert ada.get(f"{path}?kind=param").json()["data"] == []
    (thin,) = ada.get(f"{path}?layer=conv1&stat=mean,nan&max_points=40").json()["data"]
    assert len(thin["step"]) < 60
    assert {0, 40, 399} <= set(thin["step"])
    (part,) = ada.get(f"{path}?layer=conv1&from_step=10&to_step=12").json()["data"]
    assert part["step"] == [10, 11, 12]
    for query in ("stat=median", "kind=weights", "max_points=0", "from_step=1e3"):
        assert problem(ada.get(f"{path}?{query}")) == (422, "invalid_request")


def test_a_tensor_comes_as_json_npy_and_safetensors(
    ada: httpx2.Client, writer: Writer, home: Path
) -> None:
    array = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)
    array[0, 0, :3] = NONFINITE
    keep(writer, home, "conv1", "output", 25, array)
    path = f"/jobs/{writer.job.id}/layers/conv1/output"
    answer = ada.get(path)
    summary = checked(answer, inspection.Tensor)
    assert answer.headers["x-tensor-step"] == "25"
    assert (summary["shape"], summary["truncated"]) == ([4, 6, 8], False)
    assert summary["values"][0][0][:3] == ["Infinity", "-Infinity", "NaN"]
    assert (summary["stats"]["nan"], summary["stats"]["inf"]) == (1, 2)
    npy = ada.get(path, params={"format": "npy", "step": "25"})
    assert np.array_equal(np.load(io.BytesIO(npy.content)), array, equal_nan=True)
    accept = {"Accept": "application/vnd.safetensors, */*"}
    whole = ada.get(path, headers=accept)
    assert whole.headers["content-type"] == "application/vnd.safetensors"
    assert safetensors.numpy.load(whole.content)["tensor"].tobytes() == array.tobytes()
    part = ada.get(path, params={"slice": "0:4,:,::2", "format": "safetensors"})
    back = safetensors.numpy.load(part.content)["tensor"]
    assert np.array_equal(back, array[0:4, :, ::2], equal_nan=True)
    assert part.headers["content-length"] == str(len(part.content))
    ranged = ada.get(path, headers=accept | {"Range": "bytes=8-15"})
    assert (ranged.status_code, ranged.content) == (206, whole.content[8:16])
    one = ada.get(path, params={"slice": "1,2,3"}).json()
    assert one["values"] == pytest.approx(float(array[1, 2, 3]))
    tag = whole.headers["etag"]
    assert ada.get(path, headers=accept | {"If-None-Match": tag}).status_code == 304


def test_a_large_tensor_is_summed_up_in_json(
    ada: httpx2.Client, writer: Writer, home: Path
) -> None:
    array = np.arange(2_000_000, dtype=np.float32).reshape(2000, 1000)
    keep(writer, home, "conv1", "output", 0, array)
    path = f"/jobs/{writer.job.id}/layers/conv1/output"
    summary = checked(ada.get(path), inspection.Tensor)
    assert (len(summary["values"]), summary["truncated"]) == (1000, True)
    assert summary["stats"]["mean"] == pytest.approx(array.mean(dtype=np.float64))
    assert summary["stats"]["std"] == pytest.approx(array.std(dtype=np.float64))
    npy = ada.get(path, params={"format": "npy", "slice": "::-1,::3"}).content
    assert np.array_equal(np.load(io.BytesIO(npy)), array[::-1, ::3])


def test_bfloat16_is_kept_in_safetensors(ada: httpx2.Client, writer: Writer, home: Path) -> None:
    array = np.array([1.5, math.nan, -3e38], ml_dtypes.bfloat16)
    keep(writer, home, "conv1.bias", "param", 3, array)
    path = f"/jobs/{writer.job.id}/layers/conv1.bias/param"
    raw = ada.get(path, params={"format": "safetensors"}).content
    assert raw.endswith(array.tobytes())
    npy = np.load(io.BytesIO(ada.get(path, params={"format": "npy"}).content))
    assert npy.dtype == np.float32
    assert ada.get(path).json()["values"][1] == "NaN"


def test_a_step_that_was_not_captured_names_its_neighbors(
    ada: httpx2.Client, writer: Writer, home: Path
) -> None:
    path = f"/jobs/{writer.job.id}/layers"
    assert problem(ada.get(f"{path}/conv1/output")) == (404, "step_not_captured")
    for step in (0, 25, 50):
        keep(writer, home, "conv1", "output", step, np.full(3, step))
    answer = ada.get(f"{path}/conv1/output?step=26")
    assert problem(answer) == (404, "step_not_captured")
    assert answer.json()["nearest_steps"] == [0, 25, 50]
    assert ada.get(f"{path}/conv1/output?step=25").json()["values"] == [25, 25, 25]
    assert ada.get(f"{path}/conv1/output").headers["x-tensor-step"] == "50"


def test_a_tensor_that_was_never_captured_says_what_to_watch(
    ada: httpx2.Client, writer: Writer, sqlite: Database
) -> None:
    path = f"/jobs/{writer.job.id}/layers/conv1/output"

    def watch(*want: str) -> None:
        body = {"layers": ["conv1"], "kinds": ["output"], "every": 1, "want": [*want]}
        with sqlite.write() as tx:
            probes.add(
                tx, jobs.get(tx, writer.job.id, None), CheckedProbe(body, ["conv1"], 0), by="ada"
            )

    told = ada.get(path).json()
    assert told["detail"] == "No probe watches conv1 output."
    suggested = json.loads(told["hint"].partition(": ")[2])
    assert Probe.model_validate_json(json.dumps(suggested)).want == ("full",)
    watch("stats", "histogram")
    told = ada.get(path).json()
    assert told["detail"] == "The probe of conv1 output keeps no tensors."
    assert told["hint"] == 'It wants stats, histogram: add "full".'
    assert ada.get(f"/jobs/{writer.job.id}/layers/conv1.bias/param").json()["detail"] == (
        "No probe watches conv1.bias param."
    )
    watch("full")
    assert "has been captured" in ada.get(path).json()["detail"]


def test_layers_leaves_and_parameters_are_addressed_by_their_names(
    ada: httpx2.Client, writer: Writer, home: Path
) -> None:
    names = [("lstm.0", "output"), ("lstm.1.0", "output"), ("lstm.w", "param")]
    for number, (layer, kind) in enumerate(names):
        keep(writer, home, layer, kind, 0, np.full(2, number))
    path = f"/jobs/{writer.job.id}/layers"
    asked = {"lstm/output": 0, "lstm.0/output": 0, "lstm.1.0/output": 1, "lstm/param": 2}
    for name, value in asked.items():
        assert ada.get(f"{path}/{name}").json()["values"] == [value, value]
    ambiguous = ada.get(f"{path}/conv1/param")
    assert problem(ambiguous) == (404, "layer_not_found")
    assert "conv1.weight" in ambiguous.json()["hint"]
    for name in ("fc/output", "conv1.weight/output", "..%2F..%2Fetc/output", "conv1%00/output"):
        assert problem(ada.get(f"{path}/{name}"))[0] == 404, name
    for query in ("conv1/outputs", "conv1/output?step=-1", "conv1/output?step=1e9999999"):
        assert problem(ada.get(f"{path}/{query}"))[0] == 422, query


@pytest.mark.parametrize(
    "text", ["", "4", "5:9", "0,0", "a", "0;1", "::0", "0,:,:,:", "9" * 400, "..."]
)
def test_a_hostile_slice_is_refused(
    ada: httpx2.Client, writer: Writer, home: Path, text: str
) -> None:
    keep(writer, home, "conv1", "output", 0, np.zeros(3))
    answer = ada.get(f"/jobs/{writer.job.id}/layers/conv1/output", params={"slice": text})
    if text == "...":
        assert answer.status_code == 200
    else:
        assert problem(answer) == (422, "invalid_request")
        assert answer.json()["errors"][0]["pointer"] == "/query/slice"


def keep_together(
    writer: Writer, home: Path, step: int, arrays: dict[tuple[str, str], np.ndarray]
) -> None:
    """Store the tensors of a step as the worker does: in one file."""
    key = f"jobs/{writer.job.id}/1/captures/{new_id('cap')}.safetensors"
    named = {f"{layer}/{kind}": array for (layer, kind), array in arrays.items()}
    with LocalArtifacts(home / "artifacts").receive(key) as path:
        path.write_bytes(b"".join(tensors.safetensors(named, {}).parts))
    rows = [
        {
            "id": new_id("cap"), "step": step, "layer": layer, "kind": kind, "phase": "train",
            "key": key, "tensor": f"{layer}/{kind}", "shape": list(array.shape),
            "dtype": str(array.dtype), "size_bytes": array.nbytes, "form": "full", "slice": None,
            "captured_from": list(array.shape),
        }
        for (layer, kind), array in arrays.items()
    ]  # fmt: skip
    writer.ship(Batch(captures=rows))


def served_in_stretches(ada: httpx2.Client, path: str, whole: httpx2.Response) -> None:
    """Whatever stretch is asked for is that of the whole."""
    assert whole.headers["accept-ranges"] == "bytes"
    size = len(whole.content)
    assert whole.headers["content-length"] == str(size)
    for text, begin, end in (
        ("bytes=0-7", 0, 8),
        ("bytes=5-", 5, size),
        ("bytes=-3", size - 3, size),
        (f"bytes={size - 1}-{size + 9}", size - 1, size),
    ):
        part = ada.get(path, headers={"Range": text})
        assert (part.status_code, part.content) == (206, whole.content[begin:end]), text
        assert part.headers["content-range"] == f"bytes {begin}-{end - 1}/{size}"
        assert part.headers["content-length"] == str(end - begin)
    for text in (f"bytes={size}-", "bytes=-0"):
        beyond = ada.get(path, headers={"Range": text})
        assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{size}")
    for text in ("bytes=5-2", "rows=0-1", "bytes=0-1,4-5", "bytes=", "x"):
        assert ada.get(path, headers={"Range": text}).content == whole.content, text
    stale = ada.get(path, headers={"Range": "bytes=0-7", "If-Range": '"another"'})
    assert (stale.status_code, stale.content) == (200, whole.content)


def test_one_tensor_of_a_file_of_several_is_served_alone(
    ada: httpx2.Client, writer: Writer, home: Path
) -> None:
    arrays = {
        ("conv1", "output"): np.arange(7, dtype=np.uint8),
        ("lstm.0", "output"): np.arange(12.0).reshape(3, 4),
        ("conv1.bias", "param"): np.array([1.5, math.nan], ml_dtypes.bfloat16),
        ("conv1.bias", "param_grad"): np.zeros((0, 3), np.float32),
    }
    keep_together(writer, home, 4, arrays)
    for (layer, kind), array in arrays.items():
        path = f"/jobs/{writer.job.id}/layers/{layer}/{kind}?format=safetensors"
        whole = ada.get(path)
        ((name, entry),) = safetensors.deserialize(whole.content)
        assert (name, bytes(entry["data"])) == ("tensor", array.tobytes())
        assert entry["shape"] == list(array.shape)
        served_in_stretches(ada, path, whole)
        numpys = ada.get(path := path.replace("safetensors", "npy"))
        shown = np.load(io.BytesIO(numpys.content))
        np.testing.assert_array_equal(shown, array.astype(shown.dtype))
        if array.dtype != ml_dtypes.bfloat16:  # which is made anew in an npy, as float32
            served_in_stretches(ada, path, numpys)
    listed = checked(ada.get(f"/jobs/{writer.job.id}/captures?step=4"), inspection.CaptureList)[
        "data"
    ]
    assert {(entry["form"], entry["slice"]) for entry in listed} == {("full", None)}
    both = ada.get(
        f"/jobs/{writer.job.id}/tensors", params={"name": ["conv1/output", "conv1.bias/param"]}
    )
    assert set(dict(safetensors.deserialize(both.content))) == {"conv1/output", "conv1.bias/param"}


def test_captures_are_listed_page_by_page(ada: httpx2.Client, writer: Writer, home: Path) -> None:
    made = [keep(writer, home, "conv1", "output", step, np.zeros(3)) for step in range(7)]
    keep(writer, home, "lstm.0", "output", 3, np.zeros(3))
    path = f"/jobs/{writer.job.id}/captures"
    got: list[str] = []
    after = None
    while True:
        params = {"layer": "conv1", "limit": 3} | ({"after": after} if after else {})
        page = checked(ada.get(path, params=params), inspection.CaptureList)
        got += [entry["id"] for entry in page["data"]]
        after = page["next"]
        if not page["has_more"]:
            break
    assert sorted(got) == sorted(made)
    assert len(ada.get(f"{path}?step=3").json()["data"]) == 2
    href = ada.get(f"{path}?step=3&layer=conv1").json()["data"][0]["href"]
    assert ada.get(href.removeprefix("/api/v1")).json()["step"] == 3
    assert problem(ada.get(f"{path}?after=cap_x")) == (400, "invalid_cursor")


def test_several_tensors_come_in_one_file(ada: httpx2.Client, writer: Writer, home: Path) -> None:
    arrays = {
        "conv1/output": np.arange(6, dtype=np.int64),
        "lstm/output": np.ones((2, 2), np.float32),
        "conv1.bias/param": np.array([1.5], ml_dtypes.bfloat16),
    }
    stored = {"lstm/output": "lstm.0/output"}
    for name, array in arrays.items():
        layer, _, kind = stored.get(name, name).rpartition("/")
        keep(writer, home, layer, kind, 4, array)
    path = f"/jobs/{writer.job.id}/tensors"
    answer = ada.get(path, params=[("name", name) for name in arrays])
    assert answer.headers["x-tensor-step"] == "4"
    back = dict(safetensors.deserialize(answer.content))
    assert set(back) == set(arrays)
    for name, array in arrays.items():
        assert bytes(back[name]["data"]) == array.tobytes()
    assert problem(ada.get(f"{path}?name=conv1")) == (422, "invalid_request")
    assert problem(ada.get(f"{path}?name=conv1/output&step=5")) == (404, "step_not_captured")


def test_checkpoints_are_listed_read_and_deleted(
    ada: httpx2.Client, writer: Writer, home: Path
) -> None:
    data = safetensors.numpy.save({"conv1.bias": np.arange(4, dtype=np.float32)})
    name = new_id("ckpt")
    key = f"jobs/{writer.job.id}/1/checkpoints/{name}"
    store = LocalArtifacts(home / "artifacts")
    with store.receive(f"{key}/model.safetensors") as path:
        path.write_bytes(data)
    row = {"id": name, "owner": "ada", "key": key, "created_at": now(), "step": 3, "epoch": 0}
    row |= {"final": True, "size_bytes": len(data), "metrics": {"loss": math.nan}}
    row |= {"files": {"model.safetensors": {"size_bytes": len(data), "sha256": "ab"}}}
    writer.ship(Batch(checkpoints=[row]))
    (entry,) = checked(ada.get(f"/jobs/{writer.job.id}/checkpoints"), inspection.CheckpointList)[
        "data"
    ]
    assert checked(ada.get(f"/checkpoints/{name}"), inspection.Checkpoint) == entry
    assert entry["metrics"] == {"loss": "NaN"}
    weights = ada.get(f"/checkpoints/{name}/weights")
    assert weights.content == data
    tag = weights.headers["etag"]
    assert (
        ada.get(f"/checkpoints/{name}/weights", headers={"If-None-Match": tag}).status_code == 304
    )
    part = ada.get(f"/checkpoints/{name}/weights", headers={"Range": "bytes=-4", "If-Range": tag})
    assert (part.status_code, part.content) == (206, data[-4:])
    # the job would resume from it
    assert problem(ada.delete(f"/checkpoints/{name}")) == (409, "checkpoint_in_use")
    writer.finish()
    assert ada.delete(f"/checkpoints/{name}").status_code == 204
    assert problem(ada.get(f"/checkpoints/{name}")) == (404, "checkpoint_not_found")
    assert not (store.root / key).exists()


def test_what_a_checkpoint_learned_of_its_rows_is_downloaded(
    ada: httpx2.Client, writer: Writer, home: Path
) -> None:
    packed = np.frombuffer(json.dumps(["bon", "jour"]).encode(), np.uint8)
    data = safetensors.numpy.save({"text.tokens": packed})
    names = [new_id("ckpt"), new_id("ckpt")]
    keys = [f"jobs/{writer.job.id}/1/checkpoints/{name}" for name in names]
    with LocalArtifacts(home / "artifacts").receive(f"{keys[1]}/data.safetensors") as path:
        path.write_bytes(data)
    rows = [
        {"id": name, "owner": "ada", "key": key, "created_at": now(), "step": 3 + place, "epoch": 0}
        | {"final": False, "size_bytes": 1, "metrics": {}, "files": {}}
        for place, (name, key) in enumerate(zip(names, keys, strict=True))
    ]
    rows[1]["files"] = {"data.safetensors": {"size_bytes": len(data), "sha256": "ab"}}
    writer.ship(Batch(checkpoints=rows))
    without, learned = names
    assert "data" not in ada.get(f"/checkpoints/{without}").json()["links"]
    answer = ada.get(f"/checkpoints/{without}/data")
    assert problem(answer) == (404, "artifact_not_found")
    assert "learned nothing" in answer.json()["detail"]
    link = ada.get(f"/checkpoints/{learned}").json()["links"]["data"]
    assert link == f"/api/v1/checkpoints/{learned}/data"
    found = ada.get(f"/checkpoints/{learned}/data")
    assert found.content == data
    assert found.headers["content-type"] == "application/vnd.safetensors"


def test_artifacts_are_attachments(ada: httpx2.Client, writer: Writer, home: Path) -> None:
    key = f"jobs/{writer.job.id}/1/artifacts/page.html"
    with LocalArtifacts(home / "artifacts").receive(key) as path:
        path.write_bytes(b"<script>alert(1)</script>")
    row = {"name": "page.html", "media_type": "text/html", "size_bytes": 25, "key": key}
    writer.ship(Batch(artifacts=[row]))
    base = f"/jobs/{writer.job.id}/artifacts"
    (entry,) = checked(ada.get(base), inspection.ArtifactList)["data"]
    answer = ada.get(entry["href"].removeprefix("/api/v1"))
    assert answer.content == b"<script>alert(1)</script>"
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["x-content-type-options"] == "nosniff"
    for name in ("..%2F..%2Fglasshouse.db", "%2e%2e", "page.html%00", "nothing"):
        assert problem(ada.get(f"{base}/{name}"))[0] == 404, name


def test_a_plot_is_drawn_with_nonfinite_values(ada: httpx2.Client, writer: Writer) -> None:
    path = f"/jobs/{writer.job.id}/plots"
    assert problem(ada.get(f"{path}/loss")) == (404, "metric_not_found")
    writer.losses([3.0, *NONFINITE, 1.0])
    assert ada.get(f"{path}/loss").content.startswith(b"\x89PNG")
    assert b"<svg" in ada.get(f"{path}/lr?format=svg").content
    assert problem(ada.get(f"{path}/loss?format=gif")) == (422, "invalid_request")


def test_polling_can_wait_for_the_next_event(ada: httpx2.Client, writer: Writer) -> None:
    path = f"/jobs/{writer.job.id}/events"
    last = ada.get(path).json()["data"][-1]["seq"]
    timer = threading.Timer(0.5, writer.losses, [[1.0]])
    timer.start()
    began = time.monotonic()
    answer = ada.get(path, params={"after": last}, headers={"Prefer": "wait=60"})
    took = time.monotonic() - began
    timer.join()
    assert answer.json()["data"][0]["seq"] == last + 1
    assert answer.headers["preference-applied"] == "wait=60"
    assert 0.3 < took < 50
    empty = ada.get(path, params={"after": last + 1}, headers={"Prefer": "wait=1"})
    assert empty.json()["data"] == []
    writer.finish()
    end = last + 3
    began = time.monotonic()
    over = ada.get(path, params={"after": end}, headers={"Prefer": "wait=60"})
    assert (over.json()["data"], time.monotonic() - began < 50) == ([], True)


def test_a_job_says_which_value_of_each_metric_of_the_catalog_is_its_best(
    ada: httpx2.Client, writer: Writer
) -> None:
    given = {name: getattr(cls, "higher_is_better", None) for name, cls in metric_classes().items()}
    known = {name: higher for name, higher in given.items() if higher is not None}
    names = ["loss", "lr", *(f"validation/{name}" for name in (*given, *OWN))]
    writer.ship(Batch(job={"summary": {name: {"last": 1.0} for name in names}}))
    told = ada.get(f"/jobs/{writer.job.id}").json()["directions"]
    assert len(known) > 50
    for name, is_higher in known.items():
        assert told[f"validation/{name}"] == ("max" if is_higher else "min"), name
    assert told == {name: direction_of(name) for name in names if direction_of(name)}
    assert "lr" not in told
    (listed,) = (one for one in ada.get("/jobs").json()["data"] if one["id"] == writer.job.id)
    assert listed["directions"] == told
    writer.finish()


def test_nonfinite_numbers_come_through_every_route(
    ada: httpx2.Client, writer: Writer, home: Path
) -> None:
    writer.losses(NONFINITE)
    rows = [["conv1", "output", *NONFINITE, *[math.nan] * 6]]
    event = NewEvent("stats", now(), {"step": 0, "phase": "train", "columns": [], "rows": rows})
    summary = {"loss": {"last": math.nan}}
    record = stats_record(0, rows)
    writer.ship(Batch(events=[event], stats=[record], job={"summary": summary}))
    keep(writer, home, "conv1", "output", 0, np.array(NONFINITE))
    paths = ["", "/events", "/metrics", "/metrics/query?name=loss", "/layers", "/stats"]
    for path in [*paths, "/layers/conv1/output"]:
        answer = ada.get(f"/jobs/{writer.job.id}{path}")
        assert answer.status_code == 200
        json.loads(answer.text, parse_constant=pytest.fail)
        assert '"NaN"' in answer.text, path
    writer.finish()
    stream = ada.get(f"/jobs/{writer.job.id}/stream").text
    assert '"loss":"NaN"' in stream
    assert '"loss":"-Infinity"' in stream


def test_resources_of_others_are_not_found(
    sqlite: Database, writer: Writer, serve: Callable[..., Api], home: Path
) -> None:
    writer.losses([1.0])
    keep(writer, home, "conv1", "output", 0, np.zeros(3))
    api = serve(sqlite)
    job = f"/jobs/{writer.job.id}"
    paths = ["events", "stream", "metrics", "metrics/query?name=loss", "layers", "stats"]
    paths += ["captures", "layers/conv1/output", "tensors?name=conv1/output", "checkpoints"]
    paths += ["artifacts", "artifacts/x", "logs", "plots/loss"]
    with services.client(api.url, services.make_key(sqlite, "eve")[1]) as eve:
        for path in paths:
            assert problem(eve.get(f"{job}/{path}")) == (404, "job_not_found"), path
        devices = checked(eve.get("/devices"), inspection.DeviceList)["data"]
        mine = [row for row in devices if writer.job.id in row["worker"]]
        assert [(row["state"], row["job"]) for row in mine] == [("busy", None)]
    with services.client(api.url, services.make_key(sqlite, "root", "admin")[1]) as root:
        assert root.get(f"{job}/events").status_code == 200
        devices = root.get("/devices").json()["data"]
        assert writer.job.id in [row["job"] for row in devices]
    with httpx2.Client(base_url=f"{api.url}/api/v1") as nobody:
        for path in paths:
            assert problem(nobody.get(f"{job}/{path}"))[0] == 401, path
