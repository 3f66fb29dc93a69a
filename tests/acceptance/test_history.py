"""What a real job's statistics look like afterwards, through the client and plain HTTP."""

import io
from typing import Any

import httpx2
import nanoarrow
import numpy as np
import pytest
from nanoarrow import ipc
from PIL import Image

import glasshouse as gh
from glasshouse.histogram_bins import QUANTILES, RELATIVE_ERROR
from tests.acceptance.specs import digits_example

FORMS = ["stats", "quantiles", "histogram", "full"]


@pytest.fixture(scope="module")
def job(client: gh.Client, digits: str) -> gh.client.Job:
    probe = {
        "layers": ["conv1", "fc"],
        "kinds": ["output", "param", "param_grad"],
        "every": 5,
        "want": FORMS,
    }
    spec = digits_example(digits, stop={"steps": 40}, probes=[probe])
    return client.jobs.create(spec).wait(timeout=200)


@pytest.mark.parametrize(
    ("layer", "kind"),
    [("conv1", "output"), ("conv1.weight", "param"), ("fc.weight", "param_grad")],
)
def test_a_history_counts_exactly_what_the_tensors_hold(
    job: gh.client.Job, layer: str, kind: str
) -> None:
    watched = job.layers[layer]
    history = watched.history(kind, bins=32)
    stats = watched.stats(kind)
    assert history.steps.tolist() == stats.steps.tolist() == list(range(0, 40, 5))
    assert len(history.widths) <= 32
    np.testing.assert_allclose(history.density @ history.widths, 1.0)
    for place, step in enumerate(history.steps.tolist()):
        values = watched.tensor(kind, step=step).values.astype(np.float64)
        # a negative value on an edge is in the bin beyond it, away from zero
        mirrored = np.histogram(-values[values < 0], -history.edges[::-1])[0][::-1]
        counts = np.histogram(values[values >= 0], history.edges)[0] + mirrored
        assert history.counts[place].tolist() == counts.tolist()
        assert stats["mean"][place] == pytest.approx(values.mean(), rel=1e-6, abs=1e-9)
        for name, share in QUANTILES.items():
            exact = np.quantile(values, share)
            low = np.quantile(values, share, method="lower")
            high = np.quantile(values, share, method="higher")
            worst = RELATIVE_ERROR * max(abs(low), abs(high)) + 1e-9
            assert abs(stats[name][place] - exact) <= worst


def test_columns_come_as_arrow_too(job: gh.client.Job, http: httpx2.Client) -> None:
    path = f"/jobs/{job.id}/stats"
    answer = http.get(path, headers={"Accept": "application/vnd.apache.arrow.stream"})
    with ipc.InputStream.from_readable(io.BytesIO(answer.raise_for_status().content)) as stream:
        rows = nanoarrow.ArrayStream(stream).read_all().to_pylist()
    stats = job.layers["conv1"].stats("output")
    mine = [row for row in rows if (row["layer"], row["kind"]) == ("conv1", "output")]
    assert [row["l2"] for row in mine] == stats["l2"].tolist()
    assert [row["p95"] for row in mine] == stats["p95"].tolist()


def test_tensors_and_series_come_as_pictures(job: gh.client.Job) -> None:
    def size(picture: bytes) -> tuple[int, int]:
        with Image.open(io.BytesIO(picture)) as image:
            image.verify()
            return image.size

    conv1 = job.layers["conv1"]
    first, other = conv1.image("output", step=10), conv1.image("output", step=10, slice="1")
    assert size(first) == size(other)
    assert first != other
    assert size(job.layers["fc.weight"].image("param"))[0] >= 256
    plots: list[dict[str, Any]] = [
        {"name": "loss"},
        {"name": "gradient_flow"},
        {"name": "histogram", "layer": "conv1", "kind": "output"},
    ]
    drawn = [job.plot(**plot) for plot in plots]
    assert all(size(picture) > (600, 300) for picture in drawn)
    assert len(set(drawn)) == len(drawn)
    assert b"</svg>" in job.plot("gradient_flow", format="svg")
    with pytest.raises(gh.NotFoundError, match="histogram"):
        job.plot("histogram", layer="conv2", kind="output")
