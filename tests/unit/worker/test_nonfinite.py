import math
from collections.abc import Sequence
from typing import Any

from glasshouse.errors import DataFailed, NonFinite, SpecFailed
from worker.attempt.nonfinite import Nonfinite


def row(layer: str, kind: str, *, nan: float = 0, inf: float = 0) -> list[str | float]:
    return [layer, kind, *[0.0] * 7, nan, inf]


def finding(
    step: int,
    layer: str,
    tensor: str,
    kind: str,
    phase: str,
    *,
    causes: Sequence[str] = (),
    nan: float = 1,
) -> dict[str, Any]:
    where = {"step": step, "layer": layer, "tensor": tensor, "kind": kind, "phase": phase}
    return where | {"causes": [*causes], "tensors": {"rows": [row(tensor, kind, nan=nan)]}}


def test_a_finite_job_reports_nothing():
    nonfinite = Nonfinite()
    nonfinite.on_metric(0, "loss", 1.0)
    nonfinite.on_stats({"step": 0, "rows": [row("fc1", "output")]})
    assert not nonfinite.is_bad_now


def test_without_statistics_the_first_metric_is_named():
    nonfinite = Nonfinite()
    nonfinite.on_metric(3, "loss", 1.0)
    nonfinite.on_metric(4, "loss", math.inf)
    nonfinite.on_metric(5, "loss", math.nan)
    assert nonfinite.is_bad_now
    assert nonfinite.first() | {"layer": "-"} == {
        "step": 4,
        "layer": "-",
        "kind": None,
        "phase": None,
        "metric": "loss",
    }
    assert nonfinite.summary() == "loss was not finite from step 4 on."


def test_of_the_statistics_the_earliest_step_and_its_forward_pass_are_named():
    nonfinite = Nonfinite()
    rows = [
        row("fc2", "output_grad", nan=1),
        row("fc1", "output", inf=2),
        row("fc2", "output", nan=1),
    ]
    nonfinite.on_stats({"step": 7, "rows": rows})
    nonfinite.on_stats({"step": 8, "rows": [row("a", "output", nan=1)]})
    nonfinite.on_metric(7, "loss", math.nan)
    first = nonfinite.first()
    assert (first["step"], first["layer"], first["phase"]) == (7, "fc1", "forward")
    nonfinite.on_stats({"step": 6, "rows": [row("fc2", "param_grad", inf=1)]})  # told late
    first = nonfinite.first()
    assert (first["step"], first["layer"], first["phase"]) == (6, "fc2", "backward")


def test_statistics_from_after_the_first_bad_loss_do_not_take_the_blame():
    nonfinite = Nonfinite()
    nonfinite.on_metric(2, "loss", math.nan)
    nonfinite.on_stats({"step": 5, "rows": [row("fc1", "output", nan=1)]})
    assert nonfinite.first()["layer"] is None
    assert nonfinite.first()["step"] == 2


def test_a_failure_by_bad_numbers_says_where_they_came_from():
    nonfinite = Nonfinite()
    nonfinite.on_stats({"step": 7, "rows": [row("fc1", "output", nan=2)]})
    nonfinite.on_metric(7, "loss", math.nan)
    error = SpecFailed("all elements of input should be between 0 and 1", step=9, rank=0).as_dict()
    error = nonfinite.explain(error)
    assert (error["code"], error["category"]) == ("non_finite", "nonfinite")
    assert (error["layer"], error["step"], error["rank"]) == ("fc1", 7, 0)
    assert error["nonfinite"]["phase"] == "forward"
    assert "between 0 and 1" in error["message"]
    assert not error["retryable"]


def test_a_failure_by_bad_numbers_of_the_data_says_to_correct_the_data():
    nonfinite = Nonfinite()
    causes = [NonFinite.OF_DATA, NonFinite.OF_RATE]
    nonfinite.on_finding(finding(7, "image", "image", "input", "forward", causes=causes))
    nonfinite.on_metric(7, "loss", math.nan)
    error = nonfinite.explain(SpecFailed("a loss refuses it", step=7).as_dict())
    assert error["category"] == "nonfinite"
    assert error["hint"] == NonFinite.OF_DATA
    assert "learning rate" not in error["hint"]


def test_the_hint_is_the_first_cause_of_the_first_finding():
    """Also where only a norm was not finite, of which no tensor is the first bad one."""
    nonfinite = Nonfinite()
    large = NonFinite.of_field("x", 1e30)
    norm = finding(4, "fc", "fc.weight", "param_grad", "backward", causes=[large], nan=0)
    nonfinite.on_finding(norm)
    nonfinite.on_finding(finding(5, "fc", "fc", "output", "forward", causes=[NonFinite.OF_RATE]))
    nonfinite.on_metric(6, "loss", math.nan)
    error = nonfinite.explain(SpecFailed("a loss refuses it", step=7).as_dict())
    assert error["hint"] == large
    assert (error["step"], error["nonfinite"]["kind"]) == (5, "output")


def test_a_bad_row_stays_one_although_the_loss_was_nan_or_inf():
    """What the data has is not caused by the numbers of the network, and neither is its advice."""
    nonfinite = Nonfinite()
    nonfinite.on_metric(6, "loss", math.nan)
    error = DataFailed("Row 7 has no 'price'").as_dict()
    assert nonfinite.explain(error) == error
    assert nonfinite.explain(SpecFailed("between 0 and 1").as_dict())["category"] == "nonfinite"


def test_a_failure_after_the_loss_was_finite_again_stays_what_it_is():
    nonfinite = Nonfinite()
    nonfinite.on_metric(6, "loss", math.nan)
    nonfinite.on_metric(7, "loss", 1.0)
    error = SpecFailed("between 0 and 1").as_dict()
    assert nonfinite.explain(error) == error


def test_what_a_guard_has_found_is_known_without_statistics():
    nonfinite = Nonfinite()
    nonfinite.on_finding(finding(3, "fc", "fc.weight", "param", "update"))
    nothing = {"layer": None, "tensor": None, "kind": None, "phase": None}
    nonfinite.on_finding({"step": 2, **nothing, "causes": [], "tensors": {"rows": []}})
    nonfinite.on_metric(4, "loss", math.nan)
    assert nonfinite.first() == {
        "step": 3,
        "layer": "fc.weight",
        "kind": "param",
        "phase": "update",
        "metric": "loss",
    }
    assert nonfinite.summary().endswith("the param of fc.weight, in the update of step 3.")
