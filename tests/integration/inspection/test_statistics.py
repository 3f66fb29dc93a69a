"""Statistics over HTTP: quantiles, histograms, Arrow and csv; pictures of tensors and series."""

import csv
import io
import math
from pathlib import Path
from typing import Any

import httpx2
import nanoarrow
import numpy as np
import pytest
from nanoarrow import ipc
from PIL import Image

from api.schemas import inspection
from glasshouse import histogram_bins
from models.jobs.shipments import Batch
from models.observations.stats import QUANTILES, STATISTICS
from tests.integration.inspection.services import Writer, checked, problem
from tests.integration.inspection.test_queries import keep, stats_record

ARROW = {"Accept": "application/vnd.apache.arrow.stream"}
CSV = {"Accept": "text/csv"}


def arrow_rows(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == ARROW["Accept"]
    with ipc.InputStream.from_readable(io.BytesIO(answer.content)) as stream:
        return nanoarrow.ArrayStream(stream).read_all().to_pylist()


def csv_rows(answer: httpx2.Response) -> list[dict[str, str]]:
    assert answer.headers["content-type"].startswith("text/csv")
    return list(csv.DictReader(io.StringIO(answer.text)))


def counted(values: np.ndarray) -> list[list[int]]:
    numbers, counts = np.unique(histogram_bins.bins_of(values), return_counts=True)
    return [numbers.tolist(), counts.tolist()]


@pytest.fixture
def tensors() -> list[np.ndarray]:
    """The same tensor at some steps: it spreads and moves."""
    chance = np.random.default_rng(3)
    return [chance.normal(step / 4, 1 + step, size=500) for step in range(20)]


@pytest.fixture
def watched(writer: Writer, tensors: list[np.ndarray]) -> str:
    """A job with figures at every step, quantiles at every second, histograms at every step."""
    for step, values in enumerate(tensors):
        record = stats_record(step, [["conv1", "output", float(step), *[0.5] * 8]])
        record["histograms"] = [["conv1", "output", *counted(values)]]
        if step % 2 == 0:
            found = np.quantile(values, list(histogram_bins.QUANTILES.values())).tolist()
            record["quantiles"] = [["conv1", "output", *found]]
        writer.ship(Batch(stats=[record]))
    return f"/jobs/{writer.job.id}"


def test_a_figure_that_a_tensor_does_not_have_is_null_not_missing(
    ada: httpx2.Client, writer: Writer
) -> None:
    for step in range(12):
        record = stats_record(step, [["fc", "output", float(step), *[0.5] * 8]])
        writer.ship(Batch(stats=[record]))
    for points in (5, 100):
        path = f"/jobs/{writer.job.id}/stats?stat=p50,mean&max_points={points}"
        (entry,) = checked(ada.get(path), inspection.StatsList)["data"]
        assert list(entry["values"]) == ["p50", "mean"]
        assert entry["values"]["p50"] == [None] * len(entry["step"])
        assert entry["values"]["mean"] == [float(step) for step in entry["step"]]


def test_quantiles_stand_beside_figures(
    ada: httpx2.Client, watched: str, tensors: list[np.ndarray]
) -> None:
    path = f"{watched}/stats"
    (both,) = checked(ada.get(f"{path}?stat=p50,mean"), inspection.StatsList)["data"]
    assert list(both["values"]) == ["p50", "mean"]
    assert both["values"]["mean"] == [float(step) for step in range(20)]
    medians = [float(np.quantile(values, 0.5)) for values in tensors]
    assert both["values"]["p50"][::2] == medians[::2]
    (everything,) = ada.get(path).json()["data"]
    assert list(everything["values"]) == [*STATISTICS, *QUANTILES]
    assert everything["values"]["p50"] == [
        None if step % 2 else median for step, median in enumerate(medians)
    ]
    (thin,) = ada.get(f"{path}?stat=p50,mean&max_points=8").json()["data"]
    assert {0, 19, medians.index(max(medians[::2]))} <= set(thin["step"])
    assert len(thin["step"]) < 15


def test_quantiles_that_were_not_kept_come_from_histograms(
    ada: httpx2.Client, watched: str, writer: Writer, tensors: list[np.ndarray]
) -> None:
    path = f"{watched}/stats"
    (alone,) = ada.get(f"{path}?layer=conv1&stat=p01,p99").json()["data"]
    assert alone["step"] == list(range(20))
    for step, values in enumerate(tensors):
        for name, q in (("p01", 0.01), ("p99", 0.99)):
            wanted, found = float(np.quantile(values, q)), alone["values"][name][step]
            assert found == (wanted if step % 2 == 0 else pytest.approx(wanted, rel=1 / 15)), step
    record = stats_record(20, [])
    record["histograms"] = [["other", "param", *counted(tensors[3])], ["empty", "param", [], []]]
    writer.ship(Batch(stats=[record]))
    (other,) = ada.get(f"{path}?layer=other&stat=mean,p50").json()["data"]
    assert other["step"] == [20]
    assert other["values"]["mean"] == [None]
    assert other["values"]["p50"] == [
        pytest.approx(float(np.quantile(tensors[3], 0.5)), rel=1 / 15)
    ]
    (empty,) = ada.get(f"{path}?layer=empty&stat=p50").json()["data"]
    assert empty["values"]["p50"] == ["NaN"]
    assert ada.get(f"{path}?layer=other").json()["data"] == []
    (few,) = ada.get(f"{path}?layer=conv1&stat=p50&max_points=4").json()["data"]
    assert {0, 19} <= {*few["step"]}


def test_histograms_of_all_steps_share_their_edges(
    ada: httpx2.Client, watched: str, tensors: list[np.ndarray]
) -> None:
    path = f"{watched}/stats?layer=conv1&kind=output&stat=histogram"
    (found,) = checked(ada.get(f"{path}&bins=32"), inspection.StatsList)["data"]
    edges, counts = np.array(found["edges"]), np.array(found["counts"])
    assert found["step"] == list(range(20))
    assert counts.shape == (20, len(edges) - 1)
    assert len(edges) <= 33
    assert (np.diff(edges) > 0).all()
    for values, held in zip(tensors, counts, strict=True):
        narrow = values.astype(np.float32).astype(np.float64)
        assert held.tolist() == np.histogram(narrow, edges)[0].tolist()
    (some,) = ada.get(f"{path}&max_points=5&from_step=1").json()["data"]
    assert (some["step"][0], some["step"][-1], len(some["step"])) == (1, 19, 5)
    assert ada.get(f"{watched}/stats?layer=fc&stat=histogram").json()["data"] == []
    for query in ("stat=histogram,mean", "stat=p2", "stat=histogram&bins=0", "bins=1001"):
        assert problem(ada.get(f"{watched}/stats?{query}")) == (422, "invalid_request")


def test_arrow_and_csv_hold_the_same_as_json(ada: httpx2.Client, watched: str) -> None:
    path = f"{watched}/stats?stat=mean,p50"
    (series,) = ada.get(path).json()["data"]
    rows = arrow_rows(ada.get(path, headers=ARROW))
    assert [row["step"] for row in rows] == series["step"]
    assert [row["mean"] for row in rows] == series["values"]["mean"]
    assert [row["p50"] for row in rows] == series["values"]["p50"]
    assert {(row["layer"], row["kind"], row["phase"]) for row in rows} == {
        ("conv1", "output", "train")
    }
    table = csv_rows(ada.get(path, headers=CSV))
    assert [int(row["step"]) for row in table] == series["step"]
    assert [float(row["p50"]) if row["p50"] else None for row in table] == series["values"]["p50"]
    path = f"{watched}/stats?stat=histogram&bins=16"
    (histogram,) = ada.get(path).json()["data"]
    rows = arrow_rows(ada.get(path, headers=ARROW))
    assert sum(row["count"] for row in rows) == 20 * 500
    assert {row["low"] for row in rows} | {row["high"] for row in rows} == set(histogram["edges"])
    assert len(csv_rows(ada.get(path, headers=CSV))) == len(rows)
    none = f"{watched}/stats?layer=no&stat=mean"
    assert arrow_rows(ada.get(none, headers=ARROW)) == csv_rows(ada.get(none, headers=CSV)) == []
    other = ada.get(path, headers={"Accept": "image/png"})
    assert problem(other) == (406, "not_acceptable")


def test_what_is_nan_or_inf_is_so_in_every_format(ada: httpx2.Client, writer: Writer) -> None:
    odd = [math.nan, math.inf, -math.inf]
    row = ["=conv1", "output", *odd, *[0.0] * 6]
    writer.ship(Batch(stats=[stats_record(4, [row])]))
    writer.losses([1.0, math.nan])
    path = f"/jobs/{writer.job.id}/stats?stat=mean,std,min,l2"
    (found,) = ada.get(path).json()["data"]
    assert [found["values"][name] for name in ("mean", "std", "min", "l2")] == [
        ["NaN"], ["Infinity"], ["-Infinity"], [0.0]
    ]  # fmt: skip
    (one,) = arrow_rows(ada.get(path, headers=ARROW))
    assert repr([one["mean"], one["std"], one["min"]]) == repr(odd)
    (line,) = csv_rows(ada.get(path, headers=CSV))
    assert (line["layer"], line["mean"], line["min"]) == ("'=conv1", "NaN", "-Infinity")
    losses = arrow_rows(
        ada.get(f"/jobs/{writer.job.id}/metrics/query?name=loss&name=lr", headers=ARROW)
    )
    assert [(row["step"], row["lr"]) for row in losses] == [(0, 0.1), (1, 0.1)]
    assert losses[0]["loss"] == 1.0
    assert math.isnan(losses[1]["loss"])


def pixels(answer: httpx2.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "image/png"
    with Image.open(io.BytesIO(answer.content)) as image:
        image.load()
        return np.asarray(image.convert("RGB")).astype(int)


def test_feature_maps_filters_matrices_and_vectors_come_as_pictures(
    ada: httpx2.Client, writer: Writer, home: Path
) -> None:
    maps = np.zeros((3, 6, 8, 8), np.float32)
    maps[0, 0], maps[0, 1], maps[1] = 1.0, -1.0, 1.0
    maps[0, 2, 0, 0], maps[0, 3, 0, 0] = math.nan, math.inf
    keep(writer, home, "conv1", "output", 5, maps)
    path = f"/jobs/{writer.job.id}/layers/conv1/output"
    answer = ada.get(path, params={"format": "png"})
    seen = pixels(answer)
    colors = {tuple(color) for color in seen.reshape(-1, 3)}
    assert {(255, 0, 255), (0, 200, 0)} <= colors  # NaN, infinity
    assert answer.headers["x-picture"] == "example 0; 6 of 6 tiles; every value; -1 to 1"
    assert answer.headers["x-tensor-step"] == "5"
    rows, columns = 2 * 9 + 1, 3 * 9 + 1  # two rows of three tiles, with lines between
    zoom = seen.shape[0] // rows
    assert seen.shape[:2] == (rows * zoom, columns * zoom)
    red, blue = seen[zoom * 2, zoom * 2], seen[zoom * 2, zoom * 11]
    assert red[0] > 2 * red[2]
    assert blue[2] > 1.5 * blue[0]
    other = pixels(ada.get(path, params={"format": "png", "slice": "1"}))
    assert len({tuple(color) for color in other.reshape(-1, 3)}) == 2  # one color and lines
    tag = answer.headers["etag"]
    again = ada.get(path, params={"format": "png"}, headers={"If-None-Match": tag})
    assert again.status_code == 304
    keep(
        writer, home, "conv1.weight", "param", 5, np.random.default_rng(0).normal(size=(4, 1, 3, 3))
    )
    weight = f"/jobs/{writer.job.id}/layers/conv1.weight/param"
    assert (
        ada.get(weight, headers={"Accept": "image/png"})
        .headers["x-picture"]
        .startswith("4 of 4 tiles; every value; -")
    )
    keep(writer, home, "conv1.bias", "param", 5, np.arange(4.0))
    bias = pixels(ada.get(f"/jobs/{writer.job.id}/layers/conv1.bias/param?format=png"))
    assert bias.shape[1] > bias.shape[0]
    assert len({tuple(color) for color in bias.reshape(-1, 3)}) == 4


def test_a_large_tensor_makes_a_bounded_picture_and_an_odd_one_is_refused(
    ada: httpx2.Client, writer: Writer, home: Path
) -> None:
    keep(writer, home, "conv1.weight", "param", 0, np.zeros((3000, 5000), np.float16))
    path = f"/jobs/{writer.job.id}/layers/conv1.weight/param"
    answer = ada.get(f"{path}?format=png")
    assert max(pixels(answer).shape) <= 1024
    assert "one value in" in answer.headers["x-picture"]
    keep(writer, home, "conv1.weight", "param", 1, np.zeros((2, 2, 2, 2, 2)))
    assert problem(ada.get(f"{path}?format=png")) == (422, "invalid_request")
    assert pixels(ada.get(f"{path}?format=png&slice=0")).size
    keep(writer, home, "conv1.weight", "param", 2, np.zeros((0, 4)))
    assert problem(ada.get(f"{path}?format=png")) == (422, "invalid_request")
    assert problem(ada.get(f"{path}?format=npy&histogram=8")) == (422, "invalid_request")


def test_a_tensor_comes_with_a_histogram(ada: httpx2.Client, writer: Writer, home: Path) -> None:
    values = np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32)
    values[0, :3] = math.nan, math.inf, 0.0
    keep(writer, home, "conv1", "output", 0, values)
    path = f"/jobs/{writer.job.id}/layers/conv1/output"
    assert checked(ada.get(path), inspection.Tensor)["histogram"] is None
    found = checked(ada.get(f"{path}?histogram=20"), inspection.Tensor)["histogram"]
    finite = values[np.isfinite(values)].astype(np.float64)
    assert len(found["counts"]) <= 20
    assert found["counts"] == np.histogram(finite, found["edges"])[0].tolist()
    part = ada.get(f"{path}?histogram=5&slice=0,0").json()["histogram"]
    assert part == {"edges": [], "counts": []}  # a NaN alone


@pytest.mark.parametrize("plot", ["gradient_flow", "histogram?layer=conv1&kind=output"])
def test_plots_of_statistics_are_drawn_when_there_is_something(
    ada: httpx2.Client, writer: Writer, tensors: list[np.ndarray], plot: str
) -> None:
    path = f"/jobs/{writer.job.id}/plots/{plot}"
    sign = "&" if "?" in plot else "?"
    assert problem(ada.get(path)) == (404, "metric_not_found")
    pictures: list[bytes] = []
    for step, values in enumerate(tensors[:3]):
        gradient = ["conv1.weight", "param_grad", *[0.0] * 4, 10.0**step, *[0.0] * 4]
        other = ["lstm.w", "param_grad", *[0.0] * 4, [0.0, math.nan, math.inf][step], *[0.0] * 4]
        record = stats_record(step, [gradient, other])
        record["histograms"] = [["conv1", "output", *counted(values)]]
        writer.ship(Batch(stats=[record]))
        drawn = ada.get(path)
        pictures.append(drawn.content)
        assert pixels(drawn).std() > 1
    assert len(set(pictures)) == 3
    svg = ada.get(f"{path}{sign}format=svg")
    assert svg.headers["content-type"] == "image/svg+xml"
    assert b"</svg>" in svg.content


def test_plots_say_what_they_cannot_draw(ada: httpx2.Client, writer: Writer) -> None:
    writer.losses([1.0])
    path = f"/jobs/{writer.job.id}/plots"
    for query in ("histogram", "loss?layer=conv1", "gradient_flow?kind=param", "flow"):
        assert problem(ada.get(f"{path}/{query}")) == (422, "invalid_request"), query
    wrong = ada.get(f"{path}/histogram?layer=conv9&kind=output")
    assert problem(wrong) == (404, "layer_not_found")
    assert problem(ada.get(f"{path}/throughput")) == (404, "metric_not_found")
    row = {"step": 1, "epoch": 0, "name": "throughput/samples_per_s", "value": 900.0}
    writer.ship(Batch(metrics=[row]))
    assert ada.get(f"{path}/throughput").content.startswith(b"\x89PNG")
