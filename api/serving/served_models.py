"""The models that serve jobs serve, as the index of the Open Inference Protocol lists them."""

from collections.abc import Sequence
from typing import Any

from glasshouse.spec.model_names import parse_model_reference
from models.jobs.replicas import Route


def index_of(routes: Sequence[Route]) -> list[dict[str, Any]]:
    """Return an entry for each version that serve jobs serve, and each that they will serve.

    Args:
        routes: the serve jobs of one owner.
    """
    ready: dict[tuple[str, str], dict[str, Any]] = {}
    for route in routes:
        for one in route.models:
            entry = {"name": one["model"], "version": str(one["version"]), "state": "READY"}
            ready[entry["name"], entry["version"]] = entry
    names = {name for name, _ in ready}
    other: dict[tuple[str, str], dict[str, Any]] = {}
    for route in routes:
        if route.attempt is not None:
            continue
        for reference in references_of(route):
            found = parse_model_reference(reference)
            if found is None:
                continue
            entry: dict[str, Any] = {"name": found.name}
            if found.number is not None:
                entry["version"] = str(found.number)
            key = (found.name, entry.get("version", ""))
            if key in ready or (found.number is None and found.name in names):
                continue
            entry |= {"state": "UNAVAILABLE", "reason": reason_of(route)}
            other[key] = entry
    return [*ready.values(), *other.values()]


def references_of(route: Route) -> list[str]:
    """Return the references that a serve job serves while it runs."""
    return [one if isinstance(one, str) else str(one["model"]) for one in route.spec["models"]]


def reason_of(route: Route) -> str:
    """Return why no replica of a serve job answers."""
    reason = f": {route.state_reason}" if route.state_reason else ""
    return f"its serve job ({route.job}) is {route.state}{reason}"
