from pathlib import Path
from typing import Any

from glasshouse import jsonio
from worker.watching import Watching


class Told:
    """A rank that notes what it is told."""

    def __init__(self) -> None:
        self.commands: list[dict[str, Any]] = []

    def tell(self, command: dict[str, Any]) -> None:
        self.commands.append(command)


def test_a_rank_is_told_each_newer_list_once(tmp_path: Path):
    rank, watching = Told(), Watching(tmp_path)
    watching.told({"revision": 2, "probes": []})
    for revision in (None, 2, 3, 3, 5):
        watching.wanted = revision and {"revision": revision, "probes": []}
        watching.tell(rank)
    assert [command["file"] for command in rank.commands] == ["probes-3.json", "probes-5.json"]
    assert jsonio.loads((tmp_path / "probes-5.json").read_bytes())["revision"] == 5


def test_a_list_that_cannot_be_written_is_tried_again_later(tmp_path: Path):
    rank, watching = Told(), Watching(tmp_path / "not there")
    watching.wanted = {"revision": 1, "probes": []}
    watching.tell(rank)
    (tmp_path / "not there").mkdir()
    watching.tell(rank)
    assert rank.commands == []
    watching._retry_at = 0.0
    watching.tell(rank)
    assert rank.commands == [{"do": "probes", "file": "probes-1.json"}]
