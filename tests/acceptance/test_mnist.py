"""The course's network on all of MNIST, where the files are there. Takes minutes."""

import math
from pathlib import Path

import pytest

from tests.acceptance.services import ROOT, LocalService, run_python

LIMIT_S = 1800


def folder() -> Path:
    """Where the files are: beside the checkout."""
    for above in (ROOT, *ROOT.parents):
        found = above.parent / "shared" / "data" / "mnist"
        if found.is_dir():
            return found
    pytest.skip("../shared/data/mnist is not there")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_each_optimizer_learns_mnist_from_each_format(local_service: LocalService, capsys):
    script = str(ROOT / "examples" / "mnist.py")
    environment = local_service.environment | {"PYTHONPATH": str(ROOT)}
    table = run_python(script, str(folder()), environment=environment, timeout=LIMIT_S)
    with capsys.disabled():
        print(f"\n{table}")  # noqa: T201 - the figures of the documentation
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()]
    figures = {tuple(row[:2]): [float(cell) for cell in row[2:]] for row in rows[2:]}
    optimizers = ("SGD", "Momentum 0.9", "Adagrad", "Adam")
    formats = ("idx.zip", "mnist.json.gz")
    assert set(figures) == {(form, name) for form in formats for name in optimizers}
    for at_first, early, late, accuracy in figures.values():
        assert abs(at_first - math.log(10)) < 0.2
        assert late < early / 2
        assert accuracy > 0.9
