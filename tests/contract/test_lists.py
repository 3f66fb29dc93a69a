"""Tables of the documentation that list everything of a kind list exactly what the code has."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import pytest

from engine.core.timing import PARTS
from engine.datasets.formats import formats
from glasshouse.client.monitoring.callbacks import Callback
from glasshouse.spec import data, guards, metrics, preprocessing, probes, training
from glasshouse.spec.augmentation import Augment
from glasshouse.spec.network import Layer
from glasshouse.spec.presets import PRESETS
from glasshouse.spec.tensor_kinds import TENSOR_KINDS, TensorKind
from models.access.quotas import NAMES
from models.jobs import endings
from models.settings import Settings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOT_OF_ITS_OWN = {"name", "type", "args", "inputs", "shared_with", "lengths", "path"}
"""Fields of a layer that say what it is; the others are its options."""


def first_cells(page: str, header: str) -> list[str]:
    """The first cells of a table, found by the beginning of its header."""
    lines = (DOCS / page).read_text().splitlines()
    (start,) = [number for number, line in enumerate(lines) if line.startswith(header)]
    found: list[str] = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append(line.split("|")[1].strip())
    return found


def words(cells: Iterable[str], *, first: bool = False) -> list[str]:
    """What stands in code in some cells, of each all or the first; without values and calls."""
    found = [re.findall(r"`([^`]*)`", cell) for cell in cells]
    chosen = [word for some in found for word in (some[:1] if first else some)]
    return [re.split(r"[:({ ]", word)[0] for word in chosen]


def tags(union: Any) -> set[str]:
    """The values of ``type`` of the members of a union."""
    (members, *_) = get_args(union)
    return {get_args(item.model_fields["type"].annotation)[0] for item in get_args(members)}


def choices(model: Any, field: str) -> set[str]:
    return set(get_args(model.model_fields[field].annotation))


def test_the_type_and_the_table_have_the_same_kinds_of_tensors():
    assert [*TENSOR_KINDS] == [*get_args(TensorKind)]


LISTS: dict[str, tuple[str, str, set[str]]] = {
    "formats": ("concepts/datasets.md", "| `format` |", {*formats(), *data.BUILTINS}),
    "types of fields": ("concepts/datasets.md", "| `type` | column |", tags(data.Field)),
    "normalizations": (
        "concepts/datasets.md",
        "| `type` | a value becomes |",
        choices(preprocessing.Normalize, "type"),
    ),
    "augmentations": ("concepts/datasets.md", "| `type` | arguments |", tags(Augment)),
    "windows": ("concepts/datasets.md", "| `type` | columns |", tags(preprocessing.Windows)),
    "metrics": ("concepts/derived.md", "| type | of | what |", {*metrics.OWN}),
    "presets": ("concepts/presets.md", "| preset |", {*PRESETS}),
    "kinds of tensors": ("concepts/watching.md", "| kind |", {*TENSOR_KINDS}),
    "forms": ("concepts/watching.md", "| form |", {*get_args(probes.Form)}),
    "averages": (
        "concepts/training.md",
        "| type | the averages",
        choices(training.Average, "type"),
    ),
    "options of a layer": (
        "concepts/training.md",
        "| option | what |",
        {*Layer.model_fields} - NOT_OF_ITS_OWN,
    ),
    "fields of a scheduler": (
        "concepts/training.md",
        "| field | what |",
        {*training.Scheduler.model_fields},
    ),
    "checks of the guard": (
        "concepts/failing.md",
        "| `check` |",
        {*get_args(guards.NonfiniteCheck)},
    ),
    "actions of the guard": (
        "concepts/failing.md",
        "| `action` |",
        choices(guards.NonfiniteGuard, "action"),
    ),
    "ends of an attempt": ("concepts/failing.md", "| end |", {*endings.FATES}),
    "quotas": ("concepts/security.md", "| name | counts |", {*NAMES}),
    "phases of a step": (
        "concepts/where-time-goes.md",
        "| metric | what is in it |",
        {f"time/{name}" for name in (*PARTS, "step")},
    ),
    "methods of a callback": (
        "how-to/callbacks.md",
        "| method | called |",
        {name for name in vars(Callback) if name.startswith("on_")},
    ),
    "example programs": (
        "how-to/programs.md",
        "| program |",
        {path.name for path in (ROOT / "examples").glob("*.py")} - {"demo.py", "gallery.py"},
    ),
    "retention": (
        "how-to/operations.md",
        "| setting (default in days) |",
        {
            f"GLASSHOUSE_{name.upper()}"
            for name in Settings.model_fields
            if re.fullmatch("keep_.*_days", name)
        },
    ),
}
FIRST = ("types of fields", "windows", "retention")
"""Their cells have more than a name."""


@pytest.mark.parametrize("what", LISTS)
def test_a_table_lists_exactly_what_there_is(what: str):
    page, header, expected = LISTS[what]
    found = words(first_cells(page, header), first=what in FIRST)
    assert sorted(found) == sorted(expected), f"docs/{page}: the table of {what}"


def test_the_retention_table_has_the_defaults():
    for cell in first_cells("how-to/operations.md", "| setting (default in days) |"):
        name, default = re.fullmatch(r"`GLASSHOUSE_(\w+)` \(`?(\w+)`?\)", cell).groups()  # type: ignore[union-attr]
        value = Settings.model_fields[name.lower()].default
        assert default == ("null" if value is None else f"{value:g}"), cell


def test_the_table_of_ends_says_what_happens_then():
    for line in (DOCS / "concepts/failing.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and (kind := cells[0].strip("`")) in endings.FATES:
            assert cells[2].startswith(endings.FATES[kind]), line
