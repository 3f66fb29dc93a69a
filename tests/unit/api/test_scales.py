"""The plan warns about columns of very different scale, without false alarms."""

from typing import Any

import pytest

from api.submission.scales import scale_warning

FLOAT = {"dtype": "float64", "shape": []}
COLUMNS = [
    {"name": name, **FLOAT}
    for name in ("depth", "length", "mass", "male", "island", "target", "zero", "empty", "text")
] + [{"name": "image", "dtype": "uint8", "shape": [1, 28, 28]}]


def figures(mean: float, std: float, low: float = -9.0, high: float = 9e9) -> dict[str, Any]:
    return {"count": 9, "mean": mean, "std": std, "min": low, "max": high, "distinct": None}


STATISTICS: dict[str, Any] = {
    "depth": figures(17.2, 2.0),
    "length": figures(44.0, 5.0),
    "mass": figures(4200.0, 800.0),
    "male": figures(0.5, 0.5, 0, 1),
    "island": figures(0.01, 0.1, 0.0, 1.0),
    "target": figures(1e6, 1e6),
    "zero": figures(0.0, 0.0, 0, 0),
    "empty": {"count": 9, "mean": None, "std": None, "min": None, "max": None},
    "text": {"count": 9, "mean": None, "std": None, "min": None, "max": None},
    "image": figures(33.0, 78.0, 0, 255),
}
WIDE = {"type": "dense", "columns": ["depth", "length", "mass"]}
LINEAR = {"name": "fc", "type": "Linear", "inputs": ["x"]}


def spec(
    *layers: dict[str, Any], normalize: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    """A resolved spec; the target is a field that only the loss reads."""
    given = fields or {"x": WIDE}
    data = {"fields": given | {"y": {"type": "dense", "column": "target"}}}
    return {
        "network": {"layers": layers or (LINEAR,)},
        "data": data | {"normalize": normalize or {}},
    }


def warning_of(job: dict[str, Any]) -> str | None:
    found = scale_warning(job, COLUMNS, STATISTICS)
    return None if found is None else found["detail"]


def test_the_columns_the_ratio_and_what_to_write_are_named():
    found = scale_warning(spec(), COLUMNS, STATISTICS)
    assert found == {
        "pointer": "/data/normalize",
        "code": "uneven_scale",
        "detail": "the column 'mass' has values of about 4.28e+03, and 'depth' of about 17.3, 247"
        " times less, and nothing normalizes them: few networks learn well from that; write"
        ' "normalize": {"x": {"type": "standard"}} into data',
    }


def dense(column: str, **more: Any) -> dict[str, Any]:
    return {"type": "dense", "column": column, **more}


BOTH = {"name": "all", "type": "cat", "inputs": ["a", "b"]}
OF_BOTH = {"name": "fc", "type": "Linear", "inputs": ["all"]}


def test_fields_that_come_together_are_compared():
    job = spec(BOTH, OF_BOTH, a=dense("mass"), b=dense("depth"))
    assert '"a": {"type": "standard"}, "b": {"type": "standard"}' in (warning_of(job) or "")


def test_pixels_are_as_large_as_the_network_sees_them():
    layers = ({"name": "fc", "type": "Linear", "inputs": ["a"]}, {**LINEAR, "inputs": ["b"]})
    assert warning_of(spec(*layers, a=dense("image"), b=dense("depth"))) is None  # 0.33 and 17
    assert "'mass'" in (warning_of(spec(*layers, a=dense("image"), b=dense("mass"))) or "")
    assert (
        warning_of(spec(*layers, a=dense("image", scale=1.0), b=dense("mass"))) is None
    )  # 85 and 4,280


BATCH_NORM = {"name": "norm", "type": "BatchNorm1d", "inputs": ["x"]}


@pytest.mark.parametrize(
    "job",
    [
        spec(normalize={"x": {"type": "standard"}}),
        spec(BATCH_NORM, {**LINEAR, "inputs": ["norm"]}),
        spec(BOTH, {**BATCH_NORM, "inputs": ["all"]}, a=dense("mass"), b=dense("depth")),
        spec(BOTH, OF_BOTH, a=dense("mass", scale=0.001), b=dense("depth")),
        spec(x={"type": "dense", "columns": ["depth", "length"]}),
        spec(x={"type": "dense", "columns": ["mass", "male", "island"]}),
        spec(x={"type": "dense", "columns": ["mass", "zero", "empty", "text", "unknown"]}),
        spec(x=dense("mass")),
        spec(x=dense("image")),
        spec(x=dense("depth"), other=dense("mass")),
        spec(x=dense("depth"), label={"type": "integer", "column": "mass", "dim": 5000}),
        spec({"name": "fc", "type": "Linear"}, x=dense("depth"), other=dense("mass")),
    ],
    ids=[
        "normalized", "normalized by its first layer", "normalized behind cat", "scaled by hand",
        "of one scale", "one-hot beside it", "columns without figures", "a single column",
        "an image", "a field that no layer reads", "classes", "the first field is read by default",
    ],
)  # fmt: skip
def test_nothing_is_reported_of(job: dict[str, Any]):
    assert warning_of(job) is None


def test_one_reader_without_a_normalization_is_enough():
    layers = (BATCH_NORM, {**LINEAR, "inputs": ["norm"]}, {**LINEAR, "name": "skip"})
    assert warning_of(spec(*layers)) is not None
