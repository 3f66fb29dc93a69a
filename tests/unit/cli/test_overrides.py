"""``-s key=value``."""

from typing import Any

import pytest

from glasshouse.cli.arguments.overrides import apply


def spec() -> dict[str, Any]:
    layers = [{"name": "conv1", "args": {"out_channels": 8}}, {"name": "fc", "args": {}}]
    return {"optimizer": {"type": "SGD"}, "network": {"layers": layers}, "seed": 1}


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("seed=7", ["seed"], 7),
        ("optimizer.args.lr=0.001", ["optimizer", "args", "lr"], 0.001),
        ("optimizer.type=Adam", ["optimizer", "type"], "Adam"),
        ('name="7"', ["name"], "7"),
        ("name=a=b", ["name"], "a=b"),
        ("name=", ["name"], ""),
        ("metrics=[]", ["metrics"], []),
        ("evaluate=null", ["evaluate"], None),
        ("optimizer.args.lr=NaN", ["optimizer", "args", "lr"], "NaN"),
        (
            "network.layers.0.args.out_channels=4",
            ["network", "layers", 0, "args", "out_channels"],
            4,
        ),
        ("network.layers.fc.args.bias=false", ["network", "layers", 1, "args", "bias"], False),
    ],
)
def test_a_value_lands_at_its_path(text: str, path: list[Any], value: Any):
    found: Any = spec()
    apply(found, text)
    for name in path:
        found = found[name]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seed", "is not of the form"),
        ("=1", "is not of the form"),
        ("seed.deep=1", "has no fields"),
        ("seed.deep.deeper=1", "has no fields"),
        ("network.layers.7.name=x", "none of the 2 entries is '7'"),
        ("network.layers.-1.name=x", "none of the 2 entries is '-1'"),
    ],
)
def test_an_unknown_path_is_reported(text: str, told: str):
    with pytest.raises(ValueError, match=told):
        apply(spec(), text)
