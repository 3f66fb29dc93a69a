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


def test_a_finite_job_has_nothing_to_tell():
    heard = Nonfinite()
    heard.hear_metric(0, "loss", 1.0)
    heard.hear_stats({"step": 0, "rows": [row("fc1", "output")]})
    assert not heard.is_bad_now


def test_without_statistics_the_first_metric_is_named():
    heard = Nonfinite()
    heard.hear_metric(3, "loss", 1.0)
    heard.hear_metric(4, "loss", math.inf)
    heard.hear_metric(5, "loss", math.nan)
    assert heard.is_bad_now
    assert heard.first() | {"layer": "-"} == {
        "step": 4,
        "layer": "-",
        "kind": None,
        "phase": None,
        "metric": "loss",
    }
    assert heard.told() == "loss was not finite from step 4 on."


def test_of_the_statistics_the_earliest_step_and_its_forward_pass_are_named():
    heard = Nonfinite()
    rows = [
        row("fc2", "output_grad", nan=1),
        row("fc1", "output", inf=2),
        row("fc2", "output", nan=1),
    ]
    heard.hear_stats({"step": 7, "rows": rows})
    heard.hear_stats({"step": 8, "rows": [row("a", "output", nan=1)]})
    heard.hear_metric(7, "loss", math.nan)
    first = heard.first()
    assert (first["step"], first["layer"], first["phase"]) == (7, "fc1", "forward")
    heard.hear_stats({"step": 6, "rows": [row("fc2", "param_grad", inf=1)]})  # told late
    first = heard.first()
    assert (first["step"], first["layer"], first["phase"]) == (6, "fc2", "backward")


def test_statistics_from_after_the_first_bad_loss_do_not_take_the_blame():
    heard = Nonfinite()
    heard.hear_metric(2, "loss", math.nan)
    heard.hear_stats({"step": 5, "rows": [row("fc1", "output", nan=1)]})
    assert heard.first()["layer"] is None
    assert heard.first()["step"] == 2


def test_a_failure_by_bad_numbers_says_where_they_came_from():
    heard = Nonfinite()
    heard.hear_stats({"step": 7, "rows": [row("fc1", "output", nan=2)]})
    heard.hear_metric(7, "loss", math.nan)
    error = SpecFailed("all elements of input should be between 0 and 1", step=9, rank=0).as_dict()
    told = heard.explain(error)
    assert (told["code"], told["category"]) == ("non_finite", "nonfinite")
    assert (told["layer"], told["step"], told["rank"]) == ("fc1", 7, 0)
    assert told["nonfinite"]["phase"] == "forward"
    assert "between 0 and 1" in told["message"]
    assert not told["retryable"]


def test_a_failure_by_bad_numbers_of_the_data_says_to_correct_the_data():
    heard = Nonfinite()
    causes = [NonFinite.OF_DATA, NonFinite.OF_RATE]
    heard.hear_finding(finding(7, "image", "image", "input", "forward", causes=causes))
    heard.hear_metric(7, "loss", math.nan)
    told = heard.explain(SpecFailed("a loss refuses it", step=7).as_dict())
    assert told["category"] == "nonfinite"
    assert told["hint"] == NonFinite.OF_DATA
    assert "learning rate" not in told["hint"]


def test_the_hint_is_the_first_cause_of_the_first_finding():
    """Also where only a norm was not finite, of which no tensor is the first bad one."""
    heard = Nonfinite()
    large = NonFinite.of_field("x", 1e30)
    norm = finding(4, "fc", "fc.weight", "param_grad", "backward", causes=[large], nan=0)
    heard.hear_finding(norm)
    heard.hear_finding(finding(5, "fc", "fc", "output", "forward", causes=[NonFinite.OF_RATE]))
    heard.hear_metric(6, "loss", math.nan)
    told = heard.explain(SpecFailed("a loss refuses it", step=7).as_dict())
    assert told["hint"] == large
    assert (told["step"], told["nonfinite"]["kind"]) == (5, "output")


def test_a_bad_row_stays_one_although_the_loss_was_not_finite():
    """What the data has is not caused by the numbers of the network, and neither is its advice."""
    heard = Nonfinite()
    heard.hear_metric(6, "loss", math.nan)
    error = DataFailed("Row 7 has no 'price'").as_dict()
    assert heard.explain(error) == error
    assert heard.explain(SpecFailed("between 0 and 1").as_dict())["category"] == "nonfinite"


def test_a_failure_after_the_loss_was_finite_again_stays_what_it_is():
    heard = Nonfinite()
    heard.hear_metric(6, "loss", math.nan)
    heard.hear_metric(7, "loss", 1.0)
    error = SpecFailed("between 0 and 1").as_dict()
    assert heard.explain(error) == error


def test_what_a_guard_has_found_is_known_without_statistics():
    heard = Nonfinite()
    heard.hear_finding(finding(3, "fc", "fc.weight", "param", "update"))
    nothing = {"layer": None, "tensor": None, "kind": None, "phase": None}
    heard.hear_finding({"step": 2, **nothing, "causes": [], "tensors": {"rows": []}})
    heard.hear_metric(4, "loss", math.nan)
    assert heard.first() == {
        "step": 3,
        "layer": "fc.weight",
        "kind": "param",
        "phase": "update",
        "metric": "loss",
    }
    assert heard.told().endswith("the param of fc.weight, in the update of step 3.")
