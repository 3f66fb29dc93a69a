"""Which part of a tensor a probe keeps: all of it, a slice, or a sample of its first axis."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.problems import Findings
from engine.probes.watched.select import Watchable
from glasshouse.slices import BadSlice, parse, read, spelt_out
from glasshouse.spec import Probe, TrainJob
from glasshouse.spec.probes import SAMPLE_BYTES
from glasshouse.spec.tensor_kinds import OF_LAYERS

Shape = tuple[int, ...]


class TensorPart(NamedTuple):
    """A part by its name; equal names mean the same part of equal tensors."""

    form: str
    """``full``, ``slice`` or ``sample``."""
    slice: str | None


class SliceTooLarge(ValueError):
    """The part does not fit the probe's ``max_bytes``."""

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(
            f"{what} takes {size} bytes, and max_bytes is {limit}: the byte budget is too small;"
            f" the smallest that works is {size}"
        )
        self.size = size


def parts(probe: Probe, shape: Shape, item_bytes: int) -> list[TensorPart]:
    """Return the parts that a probe keeps of a tensor of this shape.

    Raises:
        SliceTooLarge: a part does not fit ``max_bytes``.
    """
    found: list[TensorPart] = []
    if "full" in probe.want:
        form = "full" if probe.slice is None else "slice"
        size = num_bytes(TensorPart(form, probe.slice), shape, item_bytes)
        if probe.max_bytes is not None and size > probe.max_bytes:
            raise SliceTooLarge("the part" if probe.slice else "the tensor", size, probe.max_bytes)
        found.append(TensorPart(form, probe.slice))
    if "sample" in probe.want:
        found.append(
            TensorPart("sample", _sample(shape, item_bytes, probe.max_bytes or SAMPLE_BYTES))
        )
    return found


def _sample(shape: Shape, item_bytes: int, limit: int) -> str | None:
    """Return as many evenly spaced entries of the first axis as fit, as a slice."""
    if not shape:
        return None
    size = shape[0]
    entry_bytes = math.prod(shape[1:]) * item_bytes
    if size and entry_bytes > limit:
        raise SliceTooLarge("one entry of the first axis", entry_bytes, limit)
    num = min(size, limit // entry_bytes) if entry_bytes else size
    return f"0:{size}:{math.ceil(size / num) if num else 1}"


def num_bytes(part: TensorPart, shape: Shape, item_bytes: int) -> int:
    """Return the size of a part in bytes."""
    kept = list(shape)
    if part.slice is not None:
        sizes = zip(_indices(part.slice, shape), shape, strict=True)
        kept = [len(range(*item.indices(n))) for item, n in sizes if isinstance(item, slice)]
    return math.prod(kept) * item_bytes


def take(tensor: Tensor, part: TensorPart) -> Tensor:
    """Return a view of a part, or a copy if its step is negative."""
    if part.slice is None:
        return tensor
    x = tensor if tensor.layout is torch.strided else tensor.to_dense()
    index: list[int | slice] = []
    backwards: list[int] = []
    num_axes = 0
    for item, size in zip(_indices(part.slice, tuple(x.shape)), x.shape, strict=True):
        run = range(*item.indices(size)) if isinstance(item, slice) else None
        if run is not None and run.step < 0:  # torch does not support a negative step
            index.append(slice(run[-1], run[0] + 1, -run.step) if run else slice(0, 0))
            backwards.append(num_axes)
        else:
            index.append(item)
        num_axes += run is not None
    found = x[tuple(index)]
    return found.flip(backwards) if backwards else found


def _indices(text: str, shape: Shape) -> list[int | slice]:
    """Return one index per axis. An index that a short batch does not have selects nothing."""
    found = spelt_out(read(text), len(shape))
    return [
        slice(0, 0) if isinstance(item, int) and not -size <= item < size else item
        for item, size in zip(found, shape, strict=True)
    ]


def kept(probes: Iterable[Probe], tensor: Tensor) -> Iterator[tuple[TensorPart, Tensor, bool]]:
    """Yield each part of a tensor that a probe keeps, once, and whether it must not be dropped."""
    shape, item_bytes = tuple(tensor.shape), tensor.element_size()
    wanted: dict[TensorPart, bool] = {}
    for probe in probes:
        for part in parts(probe, shape, item_bytes):
            wanted[part] = wanted.get(part, False) or probe.lossless
    for part, lossless in wanted.items():
        yield part, take(tensor.detach(), part), lossless


def planned(
    spec: TrainJob, number: int, seen: Iterable[str], watchable: Watchable, findings: Findings
) -> int:
    """Return the bytes that a probe keeps of a step; what it cannot keep becomes a finding."""
    probe = spec.probes[number]
    pointer = f"/probes/{number}"
    total = 0
    wrong: tuple[str, BadSlice] | None = None
    largest: tuple[str, SliceTooLarge] | None = None
    for name in seen:
        thing = watchable.thing(name)
        planned_shape, item_bytes = thing.layout or ((thing.size,), 1)
        shape, own = _shapes(spec, name, planned_shape)
        try:
            if probe.slice is not None:
                if thing.layout is None:
                    raise BadSlice("its shape is known only when the job runs: want it whole")
                parse(probe.slice, shape)
            num_own = len(probe.own_ranks(spec.processes))
            for times, one in ((1, shape), (num_own, own)):
                found = parts(probe, one, item_bytes)
                total += times * sum(num_bytes(part, one, item_bytes) for part in found)
        except BadSlice as error:
            shown = f", of shape {list(shape)}" if thing.layout else ""
            wrong = wrong or (f"{name}{shown}", error)
        except SliceTooLarge as error:
            if largest is None or error.size > largest[1].size:
                largest = (name, error)
    if wrong is not None:
        findings.problem(f"{pointer}/slice", f"of {wrong[0]}: {wrong[1]}", "slice")
    if largest is not None:
        findings.problem(f"{pointer}/max_bytes", f"of {largest[0]}: {largest[1]}", "too_small")
    return total


def _shapes(spec: TrainJob, name: str, shape: Shape) -> tuple[Shape, Shape]:
    """Return the shapes of a tensor: of all processes, and of the process with the largest part.

    ``shape``: as planned for the batch of one process.
    """
    if not shape or spec.processes == 1:
        return shape, shape
    if name.rpartition("/")[2] in OF_LAYERS:
        return (shape[0] * spec.processes // spec.parallel.num_peers, *shape[1:]), shape
    return shape, (-(-shape[0] // spec.parallel.axes.get("fsdp", 1)), *shape[1:])
