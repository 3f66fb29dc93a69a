"""The values of single processes over HTTP: statistics, histograms, tensors, plots."""

from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from safetensors.numpy import load

from api.schemas import inspection
from models.database import Database
from models.jobs.shipments import Batch
from tests.integration.inspection.services import Writer, checked, problem
from tests.integration.inspection.test_queries import keep, stats_record
from tests.integration.inspection.test_statistics import ARROW, CSV, arrow_rows, csv_rows

GRADIENT = ["conv1.weight", "param_grad"]


@pytest.fixture
def several(sqlite: Database, redis: Any) -> Writer:
    """A job of two processes; at each step the means of all, rank 0 and rank 1 are 1, 2 and 3."""
    writer = Writer(sqlite, redis).begin(processes=2)
    for step in (0, 1):
        parts = [
            {
                "rows": [
                    [*name, float(number), *[0.5] * 8] for name in (["conv1", "output"], GRADIENT)
                ],
                "histograms": [["conv1", "output", [100 * number], [number]]],
            }
            for number in (1, 2, 3)
        ]
        record = stats_record(step, []) | parts[0]
        record["ranks"] = [{"rank": rank, **part} for rank, part in enumerate(parts[1:])]
        writer.ship(Batch(stats=[record]))
    return writer


def test_statistics_are_of_all_processes_unless_a_rank_is_named(
    ada: httpx2.Client, several: Writer
) -> None:
    path = f"/jobs/{several.job.id}/stats?layer=conv1&stat=mean"
    for query, expected in (
        ("", [(None, 1.0)]),
        ("&rank=merged", [(None, 1.0)]),
        ("&rank=0", [(0, 2.0)]),
        ("&rank=1", [(1, 3.0)]),
        ("&rank=all", [(None, 1.0), (0, 2.0), (1, 3.0)]),
    ):
        found = checked(ada.get(path + query), inspection.StatsList)["data"]
        assert [(one["rank"], one["values"]["mean"]) for one in found] == [
            (rank, [mean] * 2) for rank, mean in expected
        ], query
    histograms = f"/jobs/{several.job.id}/stats?stat=histogram&rank="
    for rank, number in ((None, 1), (0, 2), (1, 3)):
        answer = ada.get(f"{histograms}{'merged' if rank is None else rank}")
        (found,) = checked(answer, inspection.StatsList)["data"]
        assert (found["rank"], found["counts"]) == (rank, [[number]] * 2)


def test_tables_have_the_rank_if_it_was_asked_for(ada: httpx2.Client, several: Writer) -> None:
    path = f"/jobs/{several.job.id}/stats?layer=conv1&stat=mean"
    assert "rank" not in arrow_rows(ada.get(path, headers=ARROW))[0]
    rows = arrow_rows(ada.get(f"{path}&rank=all", headers=ARROW))
    assert [row["rank"] for row in rows] == [None, None, 0, 0, 1, 1]
    table = csv_rows(ada.get(f"{path}&rank=all", headers=CSV))
    assert [row["rank"] for row in table] == ["", "", "0", "0", "1", "1"]
    counted = f"/jobs/{several.job.id}/stats?stat=histogram&rank=1"
    assert {row["rank"] for row in arrow_rows(ada.get(counted, headers=ARROW))} == {1}


def test_the_newest_statistics_of_layers_are_those_of_the_rank(
    ada: httpx2.Client, several: Writer
) -> None:
    for query, mean in (("", 1.0), ("?rank=0", 2.0), ("?rank=1", 3.0)):
        answer = ada.get(f"/jobs/{several.job.id}/layers{query}")
        conv1, _ = checked(answer, inspection.LayerList)["data"]
        assert conv1["stats"]["output"]["mean"] == mean
        assert conv1["tensors"]["conv1.weight"]["param_grad"]["mean"] == mean


def test_tensors_are_addressed_by_rank(ada: httpx2.Client, several: Writer, home: Path) -> None:
    name = ("conv1", "output", 5)
    keep(several, home, *name, np.arange(4.0))
    keep(several, home, *name, np.arange(4.0, 8.0), rank=1)
    base = f"/jobs/{several.job.id}"
    listed = {
        query: [
            one["rank"]
            for one in checked(ada.get(f"{base}/captures{query}"), inspection.CaptureList)["data"]
        ]
        for query in ("", "?rank=merged", "?rank=1", "?rank=0", "?rank=all")
    }
    assert listed == {
        "": [None],
        "?rank=merged": [None],
        "?rank=1": [1],
        "?rank=0": [],
        "?rank=all": [None, 1],
    }
    (own,) = ada.get(f"{base}/captures?rank=1").json()["data"]
    assert own["href"].endswith("/conv1/output?step=5&rank=1")
    whole = checked(ada.get(f"{base}/layers/conv1/output"), inspection.Tensor)
    assert (whole["rank"], whole["values"]) == (None, [0.0, 1.0, 2.0, 3.0])
    found = checked(ada.get(own["href"].removeprefix("/api/v1")), inspection.Tensor)
    assert (found["rank"], found["values"]) == (1, [4.0, 5.0, 6.0, 7.0])
    file = load(ada.get(f"{base}/tensors?name=conv1/output&rank=1").content)
    assert file["conv1/output"].tolist() == [4.0, 5.0, 6.0, 7.0]
    missing = ada.get(f"{base}/layers/conv1/output?rank=0")
    assert problem(missing) == (404, "step_not_captured")
    assert '"ranks": [0]' in missing.json()["hint"]
    assert problem(ada.get(f"{base}/tensors?name=conv1/output&rank=0")) == (
        404,
        "step_not_captured",
    )


def test_plots_are_of_a_rank(ada: httpx2.Client, several: Writer) -> None:
    base = f"/jobs/{several.job.id}/plots"
    for plot in ("gradient_flow?format=svg", "histogram?layer=conv1&kind=output&format=svg"):
        drawn = [ada.get(f"{base}/{plot}{query}") for query in ("", "&rank=0", "&rank=1")]
        assert [answer.status_code for answer in drawn] == [200] * 3
        assert len({answer.content for answer in drawn}) == 3
    assert problem(ada.get(f"{base}/loss?rank=1")) == (422, "invalid_request")


@pytest.mark.parametrize(
    "path",
    [
        "stats",
        "captures",
        "layers",
        "layers/conv1/output",
        "tensors?name=conv1/output",
        "plots/gradient_flow",
    ],
)
def test_a_rank_that_the_job_does_not_have_is_refused(
    ada: httpx2.Client, several: Writer, writer: Writer, path: str
) -> None:
    sign = "&" if "?" in path else "?"
    for rank, says in (
        ("2", "no rank 2: it has 2 processes, the ranks 0 to 1"),
        ("-1", "'-1' is no rank"),
        ("one", "'one' is no rank: give merged, or one of the ranks 0 to 1"),
    ):
        answer = ada.get(f"/jobs/{several.job.id}/{path}{sign}rank={rank}")
        assert answer.status_code == 422, answer.text
        assert answer.json()["errors"][0]["pointer"] == "/query/rank"
        assert says in answer.json()["detail"]
    alone = ada.get(f"/jobs/{writer.job.id}/{path}{sign}rank=1")
    assert "no rank 1: it has one process, the rank 0" in alone.json()["detail"]


def test_rank_0_of_a_job_with_one_process_is_the_job(ada: httpx2.Client, writer: Writer) -> None:
    writer.ship(Batch(stats=[stats_record(0, [["conv1", "output", *[1.0] * 9]])]))
    path = f"/jobs/{writer.job.id}/stats"
    assert ada.get(f"{path}?rank=0").json()["data"] == ada.get(path).json()["data"] != []
