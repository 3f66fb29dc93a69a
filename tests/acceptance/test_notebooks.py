"""The notebooks of the examples run from top to bottom, and are stored without their output."""

import json
from pathlib import Path

import pytest

from tests.acceptance.services import ROOT, LocalService, run_python

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
LIMIT_S = 250.0

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path) -> list[str]:
    """The code of a notebook, cell by cell."""
    document = json.loads(path.read_text())
    return ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]


def test_there_are_two_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["find-a-nan", "look-inside"]


@notebooks
def test_the_cells_of_a_notebook_run_from_top_to_bottom(
    path: Path, local_service: LocalService, tmp_path: Path
):
    script = tmp_path / f"{path.stem}.py"
    script.write_text("\n\n".join(cells(path)))
    environment = local_service.environment | {"PYTHONPATH": str(ROOT)}
    run_python("-W", "error", str(script), environment=environment, timeout=LIMIT_S, cwd=tmp_path)


@notebooks
def test_a_notebook_is_stored_without_its_output(path: Path):
    document = json.loads(path.read_text())
    assert document["nbformat"] == 4
    assert document["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in document["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in document["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@notebooks
def test_the_documentation_names_a_notebook(path: Path):
    name = str(path.relative_to(ROOT))
    for page in ("index.md", f"{path.stem}.md"):
        assert f"`{name}`" in (ROOT / "docs" / "tutorials" / page).read_text()
