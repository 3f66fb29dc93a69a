"""What must be the same for a job to continue the run of another one."""

from typing import Any

import pytest

from api.submission.start import what_differs
from tests.unit.engine.pipelines import at_stages, job
from tests.unit.engine.runs import planned


def resolved(batch_size: int, **parallel: Any) -> dict[str, Any]:
    return planned(job(None, parallel, batch_size=batch_size))["spec"]


ONE: dict[str, Any] = {"strategy": "none", "processes": None}


@pytest.mark.parametrize(
    ("batch_size", "parallel"),
    [
        (64, {"strategy": "pipeline"}),
        (64, {"strategy": "pipeline", "schedule": "interleaved", "micro_batches": 4}),
        (64, {"strategy": "tensor"}),
        (32, {"strategy": "fsdp"}),
        (32, {"strategy": "pipeline", "processes": None, "data": 2, "pipeline": 2}),
    ],
)
def test_a_run_continues_under_another_strategy_with_the_same_rows(batch_size, parallel):
    both = resolved(64, **ONE), resolved(batch_size, **parallel)
    assert what_differs(*both) == []
    assert what_differs(*reversed(both)) == []
    assert what_differs(both[0], resolved(batch_size // 2, **parallel)) == ["/data/batch_size"]


def test_a_run_continues_with_other_stages_of_the_same_layers():
    early, late = (planned(job(at_stages(0, *[1] * n, *[None] * (5 - n))))["spec"] for n in (1, 2))
    late["network"]["layers"][1]["stage"] = 0
    assert early["network"] != late["network"]
    assert what_differs(early, late) == []
    late["network"]["layers"][1]["args"]["out_features"] = 25
    assert what_differs(early, late) == ["/network"]
