"""The gallery of problems: each run shows its symptom, its fix does not, and so says the page."""

import io
import json
import math
import re
from collections.abc import Callable, Generator

import pytest
from PIL import Image

import glasshouse as gh
from examples import gallery
from examples.gallery import CASES, Figures
from tests.acceptance.services import ROOT

PAGE = ROOT / "docs" / "how-to" / "gallery.md"
IMAGES = ROOT / "docs" / "images"
ACCURACY = "`validation/accuracy`, last"
LOSS = "`loss`, last"
Check = Callable[[Figures, Figures], bool]

DIFFERS: dict[str, Check] = {
    "learning-rate-too-high": lambda bad, good: (
        bad["`loss`, max"] > 8 and good["`loss`, max"] < 3 and bad[LOSS] > 2 and good[LOSS] < 1
    ),
    "learning-rate-too-low": lambda bad, good: (
        bad["update/weight of `fc1`, median"] < 1e-4
        and good["update/weight of `fc1`, median"] > 1e-3
        and bad[LOSS] > 2.2
        and good[LOSS] < 1
    ),
    "vanishing-gradients": lambda bad, good: (
        bad["gradient norm of `fc1.weight`, last"] < 1e-4
        and bad["gradient norm of `out.weight`, last"] > 1e-2
        and good["gradient norm of `fc1.weight`, last"] > 1e-1
        and good[ACCURACY] > 0.4
        and bad[ACCURACY] < 0.2
    ),
    "dead-relus": lambda bad, good: (
        bad["zeros in the output of `act2`, last"] > 0.99
        and good["zeros in the output of `act2`, last"] < 0.7
        and good[ACCURACY] > 0.85
        and bad[ACCURACY] < 0.2
    ),
    "overfitting": lambda bad, good: (
        bad["`validation/loss`, last"] > 100 * bad[LOSS]
        and bad["`validation/loss`, last"] > 1.05 * bad["`validation/loss`, min"]
        and good["`validation/loss`, last"] < 0.5 * bad["`validation/loss`, last"]
        and good["`validation/loss`, last"] < 5 * good[LOSS]
    ),
    "unnormalized-inputs": lambda bad, good: (
        bad["warnings `uneven_scale`"] == 1
        and good["warnings `uneven_scale`"] == 0
        and good[ACCURACY] > 0.9
        and bad[ACCURACY] < 0.6
    ),
    "log-of-zero": lambda bad, good: (
        bad["findings"] > 0 < bad["steps whose loss is NaN or Inf"]
        and good["findings"] == 0 == good["steps whose loss is NaN or Inf"]
        and good[ACCURACY] > 0.85
        and bad[ACCURACY] < 0.2
    ),
    "softmax-before-cross-entropy": lambda bad, good: (
        bad["`loss`, min"] > math.log(9 + math.e) - 1 > 0.5 > good["`loss`, min"]
    ),
    "no-shuffling": lambda bad, good: (
        bad["`validation/loss`, last"] > 2 * good["`validation/loss`, last"]
        and good[ACCURACY] > bad[ACCURACY]
    ),
    "tiny-batches": lambda bad, good: (
        bad["`validation/loss`, last"] > 2 * good["`validation/loss`, last"]
        and good[ACCURACY] > 0.9
        and bad[ACCURACY] < 0.85
    ),
}
"""What the figures of a problem and of its fix must be, here and on the page."""


@pytest.fixture(scope="module")
def here() -> Generator[gh.Client]:
    """The service in this process, with the data of the gallery."""
    with gh.Client("inproc://") as client:
        gallery.prepare(client)
        yield client


@pytest.mark.parametrize("name", CASES)
def test_a_problem_shows_and_its_fix_removes_it(here: gh.Client, name: str):
    bad, good = (CASES[name].figures(job) for job in gallery.run(here, name))
    assert DIFFERS[name](bad, good), gallery.table(bad, good)


def test_a_picture_of_a_run_is_stored(here: gh.Client, tmp_path):
    (job, _) = gallery.run(here, "learning-rate-too-high")
    picture = job.plot("loss")
    gallery.store(picture, tmp_path / "small.png")
    small = (tmp_path / "small.png").read_bytes()
    assert len(small) < len(picture) / 2
    assert Image.open(io.BytesIO(small)).size == Image.open(io.BytesIO(picture)).size


def section(name: str) -> str:
    """What the page says of a problem."""
    sections = PAGE.read_text().split("\n## ")
    (found,) = [text for text in sections if f"gallery-{name}-problem.png" in text]
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_page_shows_figures_that_differ_in_the_same_way(name: str):
    rows = re.findall(r"^\| (.+?) \| ([-+.\de]+) \| ([-+.\de]+) \|$", section(name), re.MULTILINE)
    bad = {label: float(value) for label, value, _ in rows}
    good = {label: float(value) for label, _, value in rows}
    assert DIFFERS[name](bad, good)


@pytest.mark.parametrize("name", CASES)
def test_the_page_shows_what_differs_between_the_specs(name: str):
    blocks = re.findall(r"^```json\n(.*?)^```$", section(name), re.MULTILINE | re.DOTALL)
    patches = [CASES[name].problem, CASES[name].fix]
    shown = [patch["network"]["layers"][2:] if _has_layers(patch) else patch for patch in patches]
    assert [json.loads(block) for block in blocks] == shown


def _has_layers(patch: gallery.Spec) -> bool:
    return "layers" in patch.get("network", {})


@pytest.mark.parametrize("name", CASES)
def test_the_pictures_of_a_problem_are_there_and_small(name: str):
    for kind in ("problem", "fix"):
        path = IMAGES / f"gallery-{name}-{kind}.png"
        assert f"](../images/{path.name})" in section(name)
        assert path.stat().st_size < 60_000


def test_every_problem_of_the_page_is_in_the_program():
    shown = re.findall(r"images/gallery-([a-z-]+)-problem\.png", PAGE.read_text())
    assert sorted(shown) == sorted(CASES)
