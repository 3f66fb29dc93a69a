"""Where a body is wrong: a pointer into what was sent, whatever pydantic calls its unions."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from glasshouse.spec import TrainJob, parse_job
from glasshouse.spec.error_messages import problems_in
from tests.unit.engine.runs import spec

PLACES = [
    ({"type": "preset", "preset": "mlp", "args": {"hidden": [0]}}, "/network/args/hidden/0"),
    ({"type": "preset", "preset": "mlp", "args": {"hiden": [3]}}, "/network/args/hiden"),
    ({"type": "preset", "preset": "lost"}, "/network/preset"),
    ({"type": "preset"}, "/network/preset"),
    ({"type": "id", "layers": [{"name": "a", "type": "ReLU"}]}, "/network/type"),
    ({"layers": [{"name": "a", "type": "ReLU", "surprise": 1}]}, "/network/layers/0/surprise"),
    ({"layers": []}, "/network/layers"),
    ({}, "/network/layers"),
    (3, "/network"),
]


@pytest.mark.parametrize(("network", "pointer"), PLACES)
def test_a_wrong_network_is_pointed_at(network: Any, pointer: str):
    body = spec(network=network)
    with pytest.raises(ValidationError) as caught:
        parse_job(json.dumps(body))
    found = problems_in(caught.value.errors(), body, TrainJob)
    assert found[0].pointer == pointer
