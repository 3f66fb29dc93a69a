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
    document: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What it was read from."""

    @staticmethod
    def read(document: Mapping[str, Any]) -> "RequestedProbes":
        """Read ``{"revision": 3, "probes": [{"id": …, "probe": {…}, "new": false}]}``.

        An entry may also have ``failed`` and the ``revision`` of its last change.

        Raises:
            ValueError: the document is not such a list.
        """
        try:
            found = {
                entry["id"]: Probe.model_validate_json(json.dumps(entry["probe"]))
                for entry in document["probes"]
            }
            new = frozenset(entry["id"] for entry in document["probes"] if entry.get("new"))
            off = frozenset(entry["id"] for entry in document["probes"] if entry.get("failed"))
            since = {entry["id"]: int(entry.get("revision", 0)) for entry in document["probes"]}
            revision = int(document["revision"])
            return RequestedProbes(revision, found, new, off, since, document)
        except (KeyError, TypeError) as cause:
            raise ValueError(f"not a list of probes: {cause}") from cause

    def same_as(self, before: "RequestedProbes") -> frozenset[str]:
        """Return the ids that an earlier list has unchanged."""
        return frozenset(
            name
            for name, probe in self.probes.items()
            if before.probes.get(name) == probe
            and before.since.get(name, 0) == self.since.get(name, 0)
        )

    def changes_since(self, before: "RequestedProbes | None") -> list[dict[str, str]]:
        """Return what this list attaches, changes and removes."""
        if before is None:
            changes = {name: "attached" for name in self.probes if name in self.new}
        else:
            same = self.same_as(before)
            changes = {
                name: "changed" if name in before.probes else "attached"
                for name in self.probes
                if name not in same
            }
            changes |= {name: "removed" for name in before.probes if name not in self.probes}
        return [{"probe": name, "action": action} for name, action in changes.items()]
