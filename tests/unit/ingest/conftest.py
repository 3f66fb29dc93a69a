"""Fixtures of the ingest tests: read a small file here, or in a measured process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.datasets.ingest import ingest
from glasshouse.errors import InvalidDataset
from models.storage.columns import DatasetColumns

# A small process starts and measures the ingest: on Linux a child's peak memory starts at that of
# its parent.
MEASURE = """
import json, os, subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE)
answer = child.stdout.read()
_, status, usage = os.wait4(child.pid, 0)
child.returncode = status
peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps({"answer": answer.decode(), "status": status, "peak_bytes": peak}))
"""


class Ingesting:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0

    def file(self, content: bytes) -> Path:
        self._count += 1
        path = self.folder / f"upload-{self._count}"
        path.write_bytes(content)
        return path

    def __call__(self, name: str, content: bytes | Path, **limits: Any) -> DatasetColumns:
        source = content if isinstance(content, Path) else self.file(content)
        self._count += 1
        out = self.folder / f"dataset-{self._count}"
        meta = ingest(source, name, out, **limits)
        columns = DatasetColumns(out)
        assert columns.meta == meta
        return columns

    def problem(self, name: str, content: bytes | Path, **limits: int) -> str:
        """Read a file that must be refused and return the problem; nothing of it may be left."""
        before = {path for path in self.folder.iterdir() if path.is_dir()}
        with pytest.raises(InvalidDataset) as caught:
            self(name, content, **limits)
        assert {path for path in self.folder.iterdir() if path.is_dir()} == before
        return caught.value.detail

    def process(self, name: str, source: Path, *flags: str) -> dict[str, Any]:
        """Run the command; return its answer, status and peak memory."""
        self._count += 1
        out = self.folder / f"dataset-{self._count}"
        command = [sys.executable, "-m", "engine.datasets.ingest", "--format", name]
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, *command, "--source", source, "--out", out, *flags],
            capture_output=True,
            check=True,
        )
        measured = json.loads(done.stdout)
        measured["out"] = out
        measured["left"] = sorted(path.name for path in self.folder.glob(out.name + "*"))
        if measured["answer"]:
            measured["answer"] = json.loads(measured["answer"])
        return measured


@pytest.fixture
def ingesting(tmp_path: Path) -> Ingesting:
    return Ingesting(tmp_path)
