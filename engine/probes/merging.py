"""Merge what the processes of a job have seen of a step, so that it is the step's.

Each process has the rows of its share of the batch. Statistics of inputs, outputs and their
gradients are merged exactly, up to rounding, from those of each process and their numbers of
values. Parameters, their gradients, updates and optimizer state are the same in all processes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.distributed.group import Group
from engine.probes.statistics.native_kernel import NUM_FIGURES
from engine.probes.step_records import TensorHistogram
from engine.probes.watched.select import LOSS
from glasshouse.spec import Probe

PER_RANK = frozenset({"input", "output", "output_grad"})
"""The kinds of tensors that have different values in each process."""
_MEAN, _STD, _MIN, _MAX, _L2, _ABSMAX, _ZEROS, _NAN, _INF = range(NUM_FIGURES)

Row = tuple[str, str, Any]
"""Name, kind and statistics."""
Held = tuple[str, str, Tensor, Sequence[Probe]]
"""Kind, name, tensor, and the probes that want it whole."""


class NotAlike(Exception):
    """The processes have not watched the same tensors."""


class SharedStep:
    """What this process has seen of a step that several processes share."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.begin(has_rows=True)

    def begin(self, *, has_rows: bool) -> None:
        """Start a step; ``has_rows``: whether the rows of this process count in it."""
        self._has_rows = has_rows
        self._sizes: dict[tuple[str, str], int] = {}
        """The number of values of each tensor in this process, by name and kind."""
        self._held: dict[str, Held] = {}
        """Tensors of which this process has some rows."""
        self.missing: list[str] = []
        """In process 0: tensors whose rows could not be put together."""

    def count(self, name: str, kind: str, tensor: Tensor) -> None:
        """Note the size of a tensor whose statistics are computed."""
        self._sizes[name, kind] = tensor.numel() if self._has_rows else 0

    def hold(self, kind: str, name: str, tensor: Tensor, probes: Sequence[Probe]) -> None:
        """Copy the rows of a tensor that probes want whole. A scalar is one row."""
        rows = tensor.detach() if tensor.dim() else tensor.detach()[None]
        kept = rows if self._has_rows else rows[:0]
        self._held[f"{kind} {name}"] = (kind, name, kept.clone(), probes)

    def merge_tensors(self) -> list[Held]:
        """Return the tensors with the rows of all processes, in process 0; else nothing."""
        found = self._group.gather_rows({key: self._held[key][2] for key in sorted(self._held)})
        if self._group.is_first:
            self.missing = [name for key, (_, name, *_) in self._held.items() if key not in found]
        whole: list[Held] = []
        for key, tensor in found.items():
            kind, name, _, probes = self._held[key]
            # each process has its part of the step's loss
            whole.append((kind, name, tensor.sum() if name == LOSS else tensor, probes))
        return whole

    def merge_rows(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows with the statistics over all processes, in process 0.

        Raises:
            NotAlike: a process has other rows. All processes raise it.
        """
        own = [row for row in rows if row[1] in PER_RANK]
        label = "\n".join(f"{kind} {name}" for name, kind, _ in own)
        counts = torch.tensor([float(self._sizes[row[:2]]) for row in own], dtype=torch.float64)
        figures = [torch.as_tensor(found, dtype=torch.float64).cpu() for _, _, found in own]
        numbers = torch.cat([torch.stack(figures), counts[:, None]], dim=1) if own else counts
        found = self._group.gather_alike(label, numbers)
        if found is None:
            raise NotAlike
        if not own or not self._group.is_first:
            return [*rows]
        stacked = torch.stack(found)
        both = zip(own, merged(stacked[:, :, :-1], stacked[:, :, -1]).tolist(), strict=True)
        whole = {row[:2]: list(values) for row, values in both}
        if (key := (LOSS, "output")) in whole:  # each process has its part of the step's loss
            at = [row[:2] for row in own].index(key)
            whole[key] = _of_one_value(float(stacked[:, at, _MEAN].sum()))
        return [(*row[:2], whole.get(row[:2], row[2])) for row in rows]

    def merge_histograms(self, counted: Sequence[TensorHistogram]) -> list[TensorHistogram]:
        """Return the histograms over all processes, in process 0."""
        own = [item for item in counted if item.kind in PER_RANK]
        shares = self._group.gather(
            {
                f"{item.kind} {item.layer}": [
                    *item.counts,
                    item.figures,
                    self._sizes[item.layer, item.kind],
                ]
                for item in own
            }
        )
        if not self._group.is_first:
            return [*counted]
        return [
            _joined(item, [share[key] for share in shares if key in share])
            if item.kind in PER_RANK and (key := f"{item.kind} {item.layer}")
            else item
            for item in counted
        ]


def merged(figures_RTF: Tensor, counts_RT: Tensor) -> Tensor:
    """Merge statistics over the processes.

    Shape suffixes: R = processes, T = tensors, F = statistics.

    Args:
        figures_RTF: the statistics in each process, in the order of the columns.
        counts_RT: the number of values in each process; 0: the process does not count.

    Returns:
        The statistics of all values, [T, F], float64. The moments are NaN if no value is finite.
    """
    f = torch.where(counts_RT[..., None] > 0, figures_RTF, 0.0)
    finite_RT = counts_RT - f[..., _NAN] - f[..., _INF]
    is_some_RT = finite_RT > 0
    total_T, all_T = finite_RT.sum(0), counts_RT.sum(0)
    there = torch.where(is_some_RT[..., None], f, 0.0)
    mean_T = (there[..., _MEAN] * finite_RT).sum(0) / total_T
    spread_RT = (
        there[..., _STD] ** 2 + torch.where(is_some_RT, there[..., _MEAN] - mean_T, 0.0).square()
    )
    moments = [
        mean_T,
        ((spread_RT * finite_RT).sum(0) / total_T).sqrt(),
        torch.where(is_some_RT, f[..., _MIN], torch.inf).amin(0),
        torch.where(is_some_RT, f[..., _MAX], -torch.inf).amax(0),
        torch.linalg.vector_norm(there[..., _L2], dim=0),
        there[..., _ABSMAX].amax(0),
    ]
    moments = [torch.where(total_T > 0, item, torch.nan) for item in moments]
    zeros_T = (torch.nan_to_num(f[..., _ZEROS]) * counts_RT).sum(0) / all_T
    return torch.stack([*moments, zeros_T, f[..., _NAN].sum(0), f[..., _INF].sum(0)], dim=1)


def _joined(item: TensorHistogram, shares: Sequence[Sequence[Any]]) -> TensorHistogram:
    total: dict[int, int] = {}
    figures: list[list[float]] = []
    sizes: list[float] = []
    for bins, counts, own, size in shares:
        figures.append([float(value) for value in own])  # "NaN" too
        sizes.append(float(size))
        if size:
            for number, count in zip(bins, counts, strict=True):
                total[number] = total.get(number, 0) + count
    values = torch.tensor(figures, dtype=torch.float64)[:, None]
    whole = merged(values, torch.tensor(sizes, dtype=torch.float64)[:, None])[0].tolist()
    bins = sorted(total)
    return item._replace(figures=whole, counts=(bins, [total[number] for number in bins]))


def _of_one_value(value: float) -> list[float]:
    finite = value - value == 0.0
    is_nan = value != value  # noqa: PLR0124
    moments = [value, 0.0, value, value, abs(value), abs(value)] if finite else [torch.nan] * 6
    return [*moments, float(value == 0), float(is_nan), float(not finite and not is_nan)]
