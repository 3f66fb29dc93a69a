"""The requested probes from the next step on: the whole list, so that the newest one wins."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from glasshouse.spec import Probe


@dataclass(frozen=True, eq=False)
class RequestedProbes:
    """All probes of a job at one revision, by their ids."""

    revision: int
    """Grows with each change; 0 is the list of the spec."""
    probes: Mapping[str, Probe]
    new: frozenset[str] = frozenset()
    """Probes of a first list that were added after the job was submitted and are not reported
    yet."""
    off: frozenset[str] = frozenset()
    """Probes that the engine switched off after failures; they stay off."""
    since: Mapping[str, int] = field(default_factory=dict[str, int])
    """The revision of each probe's last change."""

    @staticmethod
    def read(document: Mapping[str, Any]) -> "RequestedProbes":
        """Read ``{"revision": 3, "probes": [{"id": …, "probe": {…}, "new": false}]}``.

        An entry may also have ``failed`` and the ``revision`` of its last change.

        Raises:
            ValueError: the document is not such a list.
        """
        try:
            found = {entry["id"]: _probe(entry["probe"]) for entry in document["probes"]}
            new = frozenset(entry["id"] for entry in document["probes"] if entry.get("new"))
            off = frozenset(entry["id"] for entry in document["probes"] if entry.get("failed"))
            since = {entry["id"]: int(entry.get("revision", 0)) for entry in document["probes"]}
            return RequestedProbes(int(document["revision"]), found, new, off, since)
        except (KeyError, TypeError) as cause:
            raise ValueError(f"not a list of probes: {cause}") from cause

    def same_as(self, before: "RequestedProbes") -> frozenset[str]:
        """Return the ids that an earlier list has unchanged."""
        return frozenset(name for name in self.probes if self._is_same(name, before))

    def _is_same(self, name: str, before: "RequestedProbes") -> bool:
        return before.probes.get(name) == self.probes[name] and before.since.get(
            name, 0
        ) == self.since.get(name, 0)

    def changes_since(self, before: "RequestedProbes | None") -> list[dict[str, str]]:
        """Return what this list attaches, changes and removes."""
        if before is None:
            return [_change(name, "attached") for name in self.probes if name in self.new]
        told: list[dict[str, str]] = []
        for name in self.probes:
            if name not in before.probes:
                told.append(_change(name, "attached"))
            elif not self._is_same(name, before):
                told.append(_change(name, "changed"))
        return told + [
            _change(name, "removed") for name in before.probes if name not in self.probes
        ]


def _probe(document: Any) -> Probe:
    return Probe.model_validate_json(json.dumps(document))


def _change(name: str, action: str) -> dict[str, str]:
    return {"probe": name, "action": action}
