"""What is found wrong with a checkpoint's files, and what a rank says of them."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from models.jobs.checkpoints import RefusedCheckpoint
from models.storage.artifacts import LocalArtifacts
from models.tables import Checkpoint
from worker.attempt.resume import DIGEST_BYTES, defect, unreadable

FILES = {"model.safetensors": b"m" * (DIGEST_BYTES + 1), "state.json": b"{}"}


@pytest.fixture
def store(tmp_path: Path) -> LocalArtifacts:
    made = LocalArtifacts(tmp_path)
    (tmp_path / "c").mkdir()
    for name, data in FILES.items():
        (tmp_path / "c" / name).write_bytes(data)
    return made


def row() -> Checkpoint:
    files: dict[str, Any] = {
        name: {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in FILES.items()
    }
    return Checkpoint(id="ckpt_1", key="c", files=files)


def test_complete_files_have_no_defect(store: LocalArtifacts):
    assert defect(store, row()) is None


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_size_is_damage(store: LocalArtifacts, name: str):
    (store.root / "c" / name).write_bytes(FILES[name] + b"x")
    size = len(FILES[name])
    assert defect(store, row()) == RefusedCheckpoint(
        "ckpt_1", f"{name} has {size + 1} bytes and not {size}"
    )


def test_a_small_file_is_read_and_a_large_one_left_to_the_engine(store: LocalArtifacts):
    (store.root / "c" / "state.json").write_bytes(b"[]")
    found = defect(store, row())
    assert found is not None
    assert found.detail == "state.json is not what was written: its digest differs"
    (store.root / "c" / "state.json").write_bytes(b"{}")
    (store.root / "c" / "model.safetensors").write_bytes(b"x" * (DIGEST_BYTES + 1))
    assert defect(store, row()) is None


def test_a_missing_file_does_not_mark_the_checkpoint_as_damaged(store: LocalArtifacts):
    (store.root / "c" / "model.safetensors").unlink()
    assert defect(store, row()) == RefusedCheckpoint(
        "ckpt_1", "model.safetensors is not there", False
    )
    for path in (store.root / "c").iterdir():
        path.unlink()
    (store.root / "c").rmdir()
    assert defect(store, row()) == RefusedCheckpoint("ckpt_1", "its directory is not there", False)


def test_only_a_damaged_checkpoint_is_one_that_cannot_be_read():
    error = {"code": "checkpoint_damaged", "message": "it has 3 bytes"}
    assert unreadable({"state": "failed", "error": error}) == "it has 3 bytes"
    assert unreadable({"state": "failed", "error": error | {"code": "data_failed"}}) is None
    assert unreadable({"state": "succeeded", "error": None}) is None
    assert unreadable(None) is None
