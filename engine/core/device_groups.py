"""Tensors of a job whose layers are on several devices: group them, or bring them together.

Nothing here waits for a device: torch orders a copy between two accelerators after what computes
its source, and before what reads it.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    """Return the tensors by their device, each group in order."""
    found: dict[torch.device, list[Tensor]] = {}
    for item in tensors:
        found.setdefault(item.device, []).append(item)
    return found


def on(device: torch.device, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors, those of other devices copied to ``device``."""
    return [item.to(device, non_blocking=True) for item in tensors]


def joined(device: torch.device, vectors: Sequence[Tensor]) -> Tensor:
    """Return vectors of one type from any devices as one on ``device``, with a copy per device."""
    places: dict[torch.device, list[int]] = {}
    for place, item in enumerate(vectors):
        places.setdefault(item.device, []).append(place)
    parts = [Tensor()] * len(vectors)
    for own in places.values():
        some = [vectors[place] for place in own]
        there = torch.cat(some).to(device, non_blocking=True).split([len(x) for x in some])
        for place, part in zip(own, there, strict=True):
            parts[place] = part
    return torch.cat(parts)
