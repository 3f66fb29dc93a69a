"""The planner's two processes: what is small does not wait for what is large."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from api.planning import planner as planners
from api.planning.planner import Planner
from glasshouse.errors import InvalidSpec
from models.settings import Settings

COLUMNS = [
    {"name": "x", "dtype": "float32", "shape": [4]},
    {"name": "y", "dtype": "int64", "shape": []},
]
METAS = {"ds_1": {"columns": COLUMNS, "splits": {"all": 100}}}


def spec(num_layers: int) -> dict[str, Any]:
    layers: list[dict[str, Any]] = [
        {"name": f"l{number}", "type": "Tanh", "inputs": ["x"] if number == 0 else None}
        for number in range(num_layers - 1)
    ]
    layers[0]["inputs"] = ["x"]
    layers = [{key: value for key, value in layer.items() if value} for layer in layers]
    layers.append({"name": "fc", "type": "Linear", "args": {"out_features": 3}})
    fields = {"x": {"type": "dense", "shape": [4]}, "y": {"type": "integer", "dim": 3}}
    source = {"dataset": "ds_1", "split": "all"}
    return {
        "kind": "train",
        "network": {"type": "graph", "layers": layers, "outputs": ["fc"]},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "y"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.1}},
        "data": {"train": source, "fields": fields, "batch_size": 10},
        "stop": {"steps": 1},
    }


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110 (a process that another one starts)
            await asyncio.sleep(0.01)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, planner_timeout_s=300)


def test_a_small_spec_does_not_wait_for_anothers_large_one(settings: Settings):
    async def ask() -> None:
        planner = Planner(settings)
        planner.open()
        try:
            await planner.plan(spec(2), METAS, owner="ada")
            large = asyncio.create_task(planner.plan(spec(10_000), METAS, owner="eve"))
            await until(lambda: planner.pids[1] is not None or large.done())
            plan = await planner.plan(spec(3), METAS, owner="ada")
            assert len(plan["layers"]) == 3
            assert not large.done(), "it was answered before the small one"
            large.cancel()
            await asyncio.gather(large, return_exceptions=True)
        finally:
            await planner.close()
        assert not [child for child in psutil.Process().children() if is_planner(child)]

    asyncio.run(ask())


def test_what_takes_longer_than_the_first_process_allows_is_planned_by_the_second(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(planners, "QUICK_S", 0.001)
    monkeypatch.setattr(planners, "_SLOW_KEPT_S", 0.0)

    async def ask() -> None:
        planner = Planner(settings)
        try:
            plan = await planner.plan(spec(60), METAS, owner="ada")
            assert len(plan["layers"]) == 60
            await until(lambda: planner.pids[1] is None)  # it is not kept for ever
            bad = spec(60) | {"loss": {"type": "NoLoss", "inputs": ["fc", "y"]}}
            with pytest.raises(InvalidSpec, match="loss"):
                await planner.plan(bad, METAS, owner="ada")
        finally:
            await planner.close()

    asyncio.run(ask())


def is_planner(process: psutil.Process) -> bool:
    return "engine.process.planner" in process.cmdline()
