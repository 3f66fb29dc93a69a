"""Merge what the processes of a job have seen of a step, so that it is the step's.

Each process has the rows of its share of the batch. Statistics of inputs, outputs and their
gradients are merged exactly, up to rounding, from those of each process and their numbers of
values. So are those of parameters, their gradients, updates and optimizer state if each process has
a part of them; otherwise they are the same in all processes. Beside the merged values, probes may
want those of single processes: they are what was sent.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.core.shards import counts_here, is_sharded, own_part, whole
from engine.distributed.group import Gathering, Group
from engine.probes.statistics.native_kernel import NUM_FIGURES
from engine.probes.step_records import TensorHistogram, landed, numbers_of
from engine.probes.watched.probe import ActiveProbe
from engine.probes.watched.select import LOSS
from glasshouse.spec import Probe

PER_RANK = frozenset({"input", "output", "output_grad"})
"""The kinds of tensors that have different values in each process."""
_MEAN, _STD, _MIN, _MAX, _L2, _ABSMAX, _ZEROS, _NAN, _INF = range(NUM_FIGURES)
_OTHER_ROWS = -torch.inf
"""Instead of a number of values: this process has other rows."""

_NOTHING = torch.empty(0)
Row = tuple[str, str, Any]
"""Name, kind and statistics."""
Key = tuple[str, str]
"""Name and kind."""
Forms = Callable[[str, str], Mapping[int, frozenset[str]]]
"""By kind and name: the forms in which probes want a tensor of single processes, by rank."""


class Held(NamedTuple):
    """A tensor, and the probes that want it whole."""

    kind: str
    name: str
    tensor: Tensor
    """A scalar is one row until the rows of all processes are there."""
    probes: Sequence[Probe]
    rank: int | None = None
    """The process whose tensor it is; None: that of all processes."""
    is_scalar: bool = False
    is_own: bool = False
    """Whether probes want it of single processes only: its rows are not put together."""


class NotAlike(Exception):
    """The processes have not watched the same tensors."""


class _Coming:
    """Statistics on their way to process 0. It looks like a ``torch.Event``."""

    def __init__(self, gathering: Gathering | None) -> None:
        """``gathering``: None: not sent."""
        self._gathering = gathering

    def query(self) -> bool:
        """Whether they have arrived."""
        return self._gathering is None or self._gathering.query()

    def synchronize(self) -> None:
        """Wait until they have arrived."""
        if self._gathering is not None:
            self._gathering.synchronize()


class ComingRows(_Coming):
    """A step's statistics on their way to process 0."""

    def __init__(
        self,
        rows: list[Row],
        own: Sequence[Row],
        gathering: Gathering | None,
        alike: Collection[Key] = (),
    ) -> None:
        """``own``: the rows that are sent; ``alike``: those of them that all processes have alike.

        ``gathering``: None: not sent.
        """
        self.rows = rows
        super().__init__(gathering)
        self._own = own
        self._alike = alike
        self._stacked: Tensor | None = None

    @property
    def same(self) -> list[Row]:
        """The rows that all processes have alike."""
        own = {row[:2] for row in self._own if row[:2] not in self._alike}
        return [row for row in self.rows if row[:2] not in own]

    def merged(self) -> list[Row]:
        """Wait for the statistics; return those over all processes, in process 0.

        Raises:
            NotAlike: a process had other rows. All processes raise it if they could not agree on
                the names, and only process 0 if one has others later.
        """
        if self._gathering is None:
            raise NotAlike
        found = self._gathering.wait()
        if not found:
            return self.rows
        stacked = torch.stack(found)
        if bool((stacked[..., -1] == _OTHER_ROWS).any()):
            raise NotAlike
        if not self._own:
            return self.rows
        self._stacked = stacked
        counts = stacked[:, :, -1].clamp(min=0)
        both = zip(self._own, merged(stacked[:, :, :-1], counts).tolist(), strict=True)
        whole = {row[:2]: list(values) for row, values in both if row[:2] not in self._alike}
        if (key := (LOSS, "output")) in whole:  # each process has its part of the step's loss
            at = [row[:2] for row in self._own].index(key)
            whole[key] = _sum_of_parts(stacked[:, at])
        return [(*row[:2], whole.get(row[:2], row[2])) for row in self.rows]

    def of_ranks(self, forms: Forms) -> dict[int, list[list[Any]]]:
        """Return the rows of single processes by rank, once all are merged.

        A process that has no value of a tensor has no row of it.
        """
        found: dict[int, list[list[Any]]] = {}
        if self._stacked is None:
            return found
        for place, (name, kind, _) in enumerate(self._own):
            for rank, wanted in forms(kind, name).items():
                *figures, size = self._stacked[rank, place].tolist()
                if size and "stats" in wanted:
                    found.setdefault(rank, []).append([name, kind, *figures])
        return found


class ComingStages(_Coming):
    """As `ComingRows`, of a pipeline: each process has sent the rows of its own layers."""

    def __init__(
        self, rows: Sequence[Row], stages: Sequence[Sequence[Key]], gathering: Gathering | None
    ) -> None:
        """``rows``: those of this process. ``stages``: the keys of those that each place sends.

        ``gathering``: None: not sent.
        """
        self.same = [*rows]
        """The rows of this process, if the others have none."""
        super().__init__(gathering)
        self._stages = stages
        self._stacked: list[Tensor] = []
        """By place: the numbers of the processes there."""

    def merged(self) -> list[Row]:
        """Wait for the statistics; return those of all layers, in process 0.

        Raises:
            NotAlike: as `ComingRows.merged`.
        """
        if self._gathering is None:
            raise NotAlike
        if not (found := self._gathering.wait()):
            return self.same
        num, whole = len(self._stages), list[Row]()
        self._stacked = [torch.stack(found[place::num]) for place in range(num)]
        for keys, stacked in zip(self._stages, self._stacked, strict=True):
            own = stacked[:, : len(keys)]
            if bool((stacked[..., -1] == _OTHER_ROWS).any()):
                raise NotAlike
            counts = own[:, :, -1].clamp(min=0)
            for key, values in zip(keys, merged(own[:, :, :-1], counts).tolist(), strict=True):
                whole.append((*key, values))
            if (key := (LOSS, "output")) in keys:
                whole[keys.index(key) - len(keys)] = (*key, _sum_of_parts(own[:, keys.index(key)]))
        return whole

    def of_ranks(self, forms: Forms) -> dict[int, list[list[Any]]]:
        """Return the rows of single processes by rank, once all are merged."""
        found: dict[int, list[list[Any]]] = {}
        for place, (keys, stacked) in enumerate(zip(self._stages, self._stacked, strict=False)):
            for number, (name, kind) in enumerate(keys):
                for rank, wanted in forms(kind, name).items():
                    if rank % len(self._stages) != place or "stats" not in wanted:
                        continue
                    *figures, size = stacked[rank // len(self._stages), number].tolist()
                    if size:
                        found.setdefault(rank, []).append([name, kind, *figures])
        return found


Coming = ComingRows | ComingStages


class SharedStep:
    """What this process has seen of a step that several processes share."""

    def __init__(self, group: Group, watches: Sequence[ActiveProbe] = ()) -> None:
        """``watches``: the probes that watch, the same in all processes."""
        self._group = group
        self._watches = watches
        self._probes = [watch.probe for watch in watches]
        self._stages: list[list[Key]] | None = None
        """In a pipeline: the rows of each place, once the processes have told each other."""
        self._agreed: tuple[str, int] | None = None
        """The names of the rows that all processes have, and their number."""
        self.begin(has_rows=True)

    def begin(self, *, has_rows: bool) -> None:
        """Start a step; ``has_rows``: whether the rows of this process count in it."""
        self._has_rows = has_rows
        self._sizes: dict[Key, int] = {}
        """The number of values of each tensor in this process, by name and kind.

        It is negative if another process has the same values, which count.
        """
        self._alike: set[Key] = set()
        """Those that all processes have alike, sent because a probe wants each process's own."""
        self._held: dict[str, Held] = {}
        """Tensors of which this process has some rows."""
        self.missing: list[str] = []
        """In process 0: tensors whose rows could not be put together."""

    def count(self, name: str, kind: str, tensor: Tensor, *, of_ranks: bool = False) -> None:
        """Note the size of a tensor whose statistics are computed and then merged.

        ``of_ranks``: a probe wants those of single processes.
        """
        if kind in PER_RANK:
            there = self._has_rows
            counts = is_sharded(tensor) or self._group.counts or self._group.is_staged
        elif self._group.is_staged or of_ranks or is_sharded(tensor):
            there, counts = True, counts_here(tensor, self._group.first_alike)
            if not (is_sharded(tensor) or self._group.is_staged):
                self._alike.add((name, kind))
        else:
            return
        size = own_part(tensor).numel() if there else 0
        self._sizes[name, kind] = size if counts else -size

    def hold(self, kind: str, name: str, tensor: Tensor, probes: Sequence[Probe]) -> None:
        """Copy the rows of a tensor that probes want whole."""
        held = Held(kind, name, whole(tensor.detach()), probes)
        is_sent = self._has_rows and (self._group.counts or self._group.is_staged)
        if kind not in PER_RANK:  # the same for all rows
            is_sent = self._group.share == 0
        self._hold(held, is_sent=is_sent)
        if self._group.num_peers > 1:  # what a process has is not what it sends of all rows
            self.hold_own(kind, name, tensor, probes)

    def hold_own(self, kind: str, name: str, tensor: Tensor, probes: Sequence[Probe]) -> None:
        """Copy this process's part of a tensor, if probes want those of single processes."""
        num, rank = self._group.size, self._group.rank
        if not (asking := [probe for probe in probes if probe.own_ranks(num)]):
            return
        there = kind not in PER_RANK or self._has_rows
        is_sent = there and any(rank in probe.own_ranks(num) for probe in asking)
        self._hold(Held(kind, name, own_part(tensor), asking, is_own=True), is_sent=is_sent)

    def _hold(self, held: Held, *, is_sent: bool) -> None:
        tensor = held.tensor.detach()
        rows = tensor if tensor.dim() else tensor[None]
        rows = (rows if is_sent else rows[:0]).clone()
        key = f"{held.kind} {held.name}" + (" own" if held.is_own else "")
        self._held[key] = held._replace(tensor=rows, is_scalar=not tensor.dim())

    def merge_tensors(self) -> list[Held]:
        """Return the tensors with the rows of all processes, in process 0; else nothing.

        After each come those of the processes whose own tensor probes want.
        """
        num, has_peers = self._group.size, self._group.num_peers > 1
        known, ranks = self._all_held()
        apart = {
            key
            for key, held in self._held.items()
            if held.is_own or (not has_peers and any(probe.own_ranks(num) for probe in held.probes))
        }
        sent = {key: self._held[key].tensor for key in sorted(self._held)}
        found = self._group.gather_parts(sent, apart)
        self.missing = []
        if self._group.is_first:
            self.missing = [held.name for key, held in known.items() if key not in found]
        whole: list[Held] = []
        for key, parts in found.items():
            held = known[key]
            if not held.is_own and len({part.shape[1:] for part in parts}) == 1:
                rows = torch.cat(parts)
                # each process has its part of the step's loss
                whole.append(held._replace(tensor=rows.sum() if held.name == LOSS else rows))
            elif not held.is_own:
                self.missing.append(held.name)
            asked = key in apart or held.is_own
            for rank, part in zip(ranks.get(key, range(num)), parts if asked else (), strict=False):
                wanted = [probe for probe in held.probes if rank in probe.own_ranks(num)]
                if wanted and part.numel():
                    own = part[0] if held.is_scalar else part
                    whole.append(held._replace(tensor=own, probes=wanted, rank=rank))
        return whole

    def _all_held(self) -> tuple[dict[str, Held], dict[str, list[int]]]:
        """Return what the processes hold, and in a pipeline the ranks that do; in process 0.

        In a pipeline process 0 does not have the others' tensors, but learns what they are.
        """
        if not self._group.is_staged:
            return self._held, {}
        numbers = {id(probe): number for number, probe in enumerate(self._probes)}
        own = {
            key: [held.kind, held.name, held.is_scalar, held.is_own]
            + [numbers[id(probe)] for probe in held.probes]
            for key, held in self._held.items()
        }
        known, ranks = dict(self._held), dict[str, list[int]]()
        for rank, share in enumerate(self._group.gather(own)):
            for key, (kind, name, is_scalar, is_own, *wanted) in share.items():
                probes = [self._probes[number] for number in wanted]
                more = Held(kind, name, _NOTHING, probes, is_scalar=is_scalar, is_own=is_own)
                known.setdefault(key, more)
                ranks.setdefault(key, []).append(rank)
        return known, ranks

    def start_rows(self, rows: Sequence[Row]) -> Coming:
        """Start to send the statistics of this process to process 0.

        The first time, the processes agree on the names of the rows.
        """
        if self._group.is_staged:
            return self._start_stages(rows)
        own = [row for row in rows if row[:2] in self._sizes]
        label = "\n".join(f"{kind} {name}" for name, kind, _ in own)
        if self._agreed is None:
            if not self._group.is_alike(label, len(own)):
                return ComingRows([*rows], own, None)
            self._agreed = label, len(own)
        label_agreed, num_agreed = self._agreed
        if own and label == label_agreed:
            sizes = torch.tensor([self._sizes[row[:2]] for row in own], dtype=torch.float64)
            figures = [torch.as_tensor(found, dtype=torch.float64).cpu() for _, _, found in own]
            numbers = torch.cat([torch.stack(figures), sizes[:, None]], dim=1)
        else:
            numbers = torch.full((num_agreed, NUM_FIGURES + 1), _OTHER_ROWS, dtype=torch.float64)
        return ComingRows([*rows], own, self._group.start_gather(numbers), {*self._alike})

    def _start_stages(self, rows: Sequence[Row]) -> ComingStages:
        own = [row for row in rows if row[:2] in self._sizes]
        keys = [row[:2] for row in own]
        stages = self._stages = self._stages or self._told_stages(keys)
        if stages is None:
            return ComingStages(rows, [], None)
        most = max(map(len, stages))
        numbers = torch.zeros((most, NUM_FIGURES + 1), dtype=torch.float64)
        if keys != stages[self._group.place]:
            numbers[:] = _OTHER_ROWS
        elif own:
            sizes = [float(self._sizes[key]) for key in keys]
            figures = [torch.as_tensor(found, dtype=torch.float64).cpu() for _, _, found in own]
            numbers[: len(own), :-1] = torch.stack(figures)
            numbers[: len(own), -1] = torch.tensor(sizes, dtype=torch.float64)
        return ComingStages(rows, stages, self._group.start_gather(numbers))

    def _told_stages(self, keys: Sequence[Key]) -> list[list[Key]] | None:
        """Return what each place sends, and note which probes have seen it. Collective.

        None: the processes of one place do not have the same.
        """
        seen = [
            [kind, name, [n for n, watch in enumerate(self._watches) if watch.has_seen(kind, name)]]
            for name, kind in self._sizes
        ]
        told = self._group.broadcast(self._group.gather({"keys": keys, "seen": seen}))
        num, shares = self._group.num_peers, self._group.num_shares
        if any(told[place::num] != [told[place]] * shares for place in range(num)):
            return None
        for one in told[:num]:
            for kind, name, numbers in one["seen"]:
                for number in numbers:
                    self._watches[number].learn(kind, name)
        return [[(name, kind) for name, kind in one["keys"]] for one in told[:num]]

    def merge_histograms(
        self, counted: Sequence[TensorHistogram], forms: Forms
    ) -> tuple[list[TensorHistogram], dict[int, list[TensorHistogram]]]:
        """Return the histograms over all processes, and those of single ones, in process 0.

        Waits for the device.
        """
        if numbers := numbers_of(counted):
            there = torch.cat([item.reshape(-1).to("cpu", torch.float64) for item in numbers])
            counted = [*landed(counted, there)]
        own = [item for item in counted if (item.layer, item.kind) in self._sizes]
        shares = self._group.gather(
            {
                f"{item.kind} {item.layer}": [
                    *item.counts,
                    item.figures,
                    self._sizes[item.layer, item.kind],
                    sorted(item.wanted),
                ]
                for item in own
            }
        )
        if not self._group.is_first:
            return [*counted], {}
        whole: list[TensorHistogram] = []
        of_ranks: dict[int, list[TensorHistogram]] = {}
        for item in [*counted, *_of_others(counted, shares)]:
            key = f"{item.kind} {item.layer}"
            found = {rank: share[key] for rank, share in enumerate(shares) if key in share}
            is_alike = not found or (item.layer, item.kind) in self._alike
            whole.append(item if is_alike else _joined(item, [*found.values()]))
            for rank, wanted in forms(item.kind, item.layer).items():
                if rank in found and found[rank][3]:
                    bins, counts, own_figures, *_ = found[rank]
                    figures = [float(value) for value in own_figures]
                    one = item._replace(figures=figures, counts=(bins, counts), wanted=wanted)
                    of_ranks.setdefault(rank, []).append(one)
        return whole, of_ranks


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


def _of_others(
    counted: Sequence[TensorHistogram], shares: Sequence[Mapping[str, Sequence[Any]]]
) -> list[TensorHistogram]:
    """Return the histograms of layers that only other processes have."""
    own = {f"{item.kind} {item.layer}" for item in counted}
    found: dict[str, TensorHistogram] = {}
    for share in shares:
        for key, (bins, counts, figures, _, wanted) in share.items():
            if key not in own:
                kind, _, layer = key.partition(" ")
                made = TensorHistogram(layer, kind, figures, (bins, counts), frozenset(wanted))
                found.setdefault(key, made)
    return [*found.values()]


def _joined(item: TensorHistogram, shares: Sequence[Sequence[Any]]) -> TensorHistogram:
    total: dict[int, int] = {}
    figures: list[list[float]] = []
    sizes: list[float] = []
    for bins, counts, own, size, _ in shares:
        figures.append([float(value) for value in own])  # "NaN" too
        sizes.append(max(0.0, float(size)))
        if size > 0:
            for number, count in zip(bins, counts, strict=True):
                total[number] = total.get(number, 0) + count
    values = torch.tensor(figures, dtype=torch.float64)[:, None]
    whole = merged(values, torch.tensor(sizes, dtype=torch.float64)[:, None])[0].tolist()
    bins = sorted(total)
    return item._replace(figures=whole, counts=(bins, [total[number] for number in bins]))


def _sum_of_parts(parts_RF: Tensor) -> list[float]:
    """Return the statistics of a number of which each process has its part."""
    parts_R = torch.where(parts_RF[:, -1] > 0, parts_RF[:, _MEAN], 0.0)
    return _of_one_value(float(parts_R.sum()))


def _of_one_value(value: float) -> list[float]:
    finite = value - value == 0.0
    is_nan = value != value  # noqa: PLR0124
    moments = [value, 0.0, value, value, abs(value), abs(value)] if finite else [torch.nan] * 6
    return [*moments, float(value == 0), float(is_nan), float(not finite and not is_nan)]
