"""Versions of models in memory: batches of several requests equal torch by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.checkpoint.checkpoint import load_model
from engine.inference.blocks import Column
from engine.network.network import Network
from engine.serving import requests
from engine.serving.asked import Asked
from engine.serving.served_models import ServedEntry, ServedVersion, VersionName
from glasshouse.spec import parse_job, parse_trained
from tests.unit.engine.ragged import job, meta_of, texts
from tests.unit.engine.runs import of_type, planned, run

CPU = torch.device("cpu")
ROWS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 1, 2], [3]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("trained")
    few = texts(folder / "few")
    resolved = planned(job(), meta_of(few))["spec"]
    records = run(folder / "job", resolved, few)
    return resolved, folder / "job" / of_type(records, "checkpoint")[-1]["dir"]


def version_of(trained: tuple[dict[str, Any], Path], max_rows: int = 64) -> ServedVersion:
    found = parse_trained(json.dumps(trained[0]))
    assert found is not None
    version = ServedVersion(VersionName("m", 1, "ckpt_1", trained[1]), found, CPU, max_rows)
    version.warm_up()
    return version


@pytest.fixture(scope="module")
def version(trained: tuple[dict[str, Any], Path]) -> ServedVersion:
    return version_of(trained)


def ask(version: ServedVersion, rows: list[list[int]], **more: Any) -> Asked:
    body = json.dumps({"inputs": {"ids": rows}, **more}).encode()
    return requests.read({"content_type": "application/json"}, body, version.inputs)


@torch.inference_mode()
def by_hand(trained: tuple[dict[str, Any], Path], row: list[int], layer: str) -> Tensor:
    network = Network(parse_job(json.dumps(trained[0])).network, [layer])
    load_model(trained[1], network)
    x = {"ids": torch.tensor([row]), "ids.lengths": torch.tensor([len(row)])}
    return network.eval()(x)[layer][0]


def rows_of(column: Column) -> list[Tensor]:
    return list(column.by_row())


@pytest.mark.parametrize("max_rows", [64, 2])
def test_requests_that_are_computed_together_get_their_own_rows(
    trained: tuple[dict[str, Any], Path], max_rows: int
):
    version = version_of(trained, max_rows)
    parts = [ROWS[:2], ROWS[2:3], ROWS[3:]]
    found = version.compute([ask(version, rows, outputs=["fc", "emb"]) for rows in parts])
    assert len(found) == 3
    for columns, rows in zip(found, parts, strict=True):
        for layer in ("fc", "emb"):
            column = columns[f"{layer}/value"]
            values = rows_of(column)
            assert len(values) == len(rows)
            for value, row in zip(values, rows, strict=True):
                wanted = by_hand(trained, row, layer)
                assert value.shape == wanted.shape
                assert torch.allclose(value, wanted, rtol=1e-6, atol=1e-7), (layer, row)


def test_outputs_of_any_layer_share_the_weights(version: ServedVersion):
    alone = version.compute([ask(version, ROWS, outputs=["emb"])])[0]
    both = version.compute([ask(version, ROWS, outputs=["fc", "emb"])])[0]
    assert torch.equal(alone["emb/value"].values, both["emb/value"].values)
    views = [version._view(outputs) for outputs in (("emb",), ("fc", "emb"))]  # pyright: ignore[reportPrivateUsage]
    first, second = (dict(view.named_parameters()) for view in views)
    shared = first.keys() & second.keys()
    assert shared
    assert all(first[name] is second[name] for name in shared)
    assert "fc" not in views[0].layers  # only what the output depends on


def test_nothing_is_trained(version: ServedVersion):
    view = version._view(("fc",))  # pyright: ignore[reportPrivateUsage]
    assert not any(parameter.requires_grad for parameter in view.parameters())
    assert not view.training


def test_a_canary_answers_its_share(version: ServedVersion, trained: tuple[dict[str, Any], Path]):
    other = version_of(trained)
    entry = ServedEntry("m", version, canary=other, canary_share=0.25)
    chosen = sum(entry.choose() is other for _ in range(10_000))
    assert 2500 - 215 < chosen < 2500 + 215  # five standard deviations: one in 1.7 million
    assert entry.choose_shadow() is None
    always = ServedEntry("m", version, shadow=other, shadow_share=1.0)
    assert always.choose() is version
    assert always.choose_shadow() is other
    assert always.versions == (version, other)
