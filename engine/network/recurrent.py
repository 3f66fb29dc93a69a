"""Layers that process the steps of a row and use row lengths to ignore padding.

A batch of sequences is padded to its longest row. These layers get the lengths and output what each
row would output alone. Depends on torch, not on graphs or data.

Shape suffixes: B = rows of a batch, T = steps of the longest row, D = width, S = the steps of all
rows together.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from engine.network.lengths import Lengths, TakesLengths


class Recurrent(TakesLengths, nn.Module):
    """Packs a recurrent layer's input by length, and pads its output with zeros."""

    batch_first: bool
    carries = False
    """Whether a batch starts with the final state of the previous batch."""
    hidden_state: tuple[Tensor, ...] | None = None
    """That state, [layers, rows, width]; None: zeros."""
    meta_steps = 1
    """On the meta device, about how many steps are run one after another."""

    def forward(
        self,
        input: Tensor,  # noqa: A002 (torch's name)
        hx: Any = None,
        *,
        lengths: Lengths | None = None,
    ) -> Any:
        """Run torch's layer; steps past the end of a row have no effect."""
        if isinstance(self, nn.LSTM) and _needs_float32(input):
            with torch.autocast("cpu", enabled=False):
                return self._carry(input.float(), hx, lengths)
        return self._carry(input, hx, lengths)

    def _carry(self, input: Tensor, hx: Any, lengths: Lengths | None) -> Any:  # noqa: A002
        if not self.carries:
            return self._run(input, hx, lengths)
        if self.hidden_state is not None:
            hx = _of_rows(self.hidden_state, input.shape[0 if self.batch_first else 1])
        output, state = self._run(input, hx, lengths)
        states = state if isinstance(state, tuple) else (state,)
        self.hidden_state = tuple(item.detach() for item in states)
        return output, state

    def _run(self, input: Tensor, hx: Any, lengths: Lengths | None) -> Any:  # noqa: A002
        run: Any = super().forward
        if input.is_meta and input.dim() == 3:
            return self._without_data(run, input, hx)
        if lengths is None or isinstance(input, PackedSequence):
            return run(input, hx)
        host_B = lengths.on_host
        num_steps = input.shape[1 if self.batch_first else 0]
        packed = pack_padded_sequence(
            input, host_B.clamp(min=1), batch_first=self.batch_first, enforce_sorted=False
        )
        output, state = run(packed, hx)
        output, _ = pad_packed_sequence(
            output, batch_first=self.batch_first, total_length=num_steps
        )
        if not bool((host_B == 0).any()):
            return output, state
        return self._without_empty(output, state, hx, lengths.of_rows == 0)

    def _without_data(self, run: Any, input: Tensor, hx: Any) -> Any:  # noqa: A002 (torch's name)
        """Run the layer on the meta device in a few steps: the others become additional rows.

        Shapes, operations and memory are those of all steps. Each sequential step takes some
        milliseconds to plan, and rows may have thousands. Temporary memory of a step is counted for
        all steps that run in parallel.
        """
        time = 1 if self.batch_first else 0
        num_rows, num_steps = input.shape[1 - time], input.shape[time]
        turns = _turns(num_steps, self.meta_steps)
        beside = -(-num_steps // turns)
        behind = turns * beside - num_steps
        if behind:
            input = F.pad(input, (0, 0, 0, behind) if self.batch_first else (0, 0, 0, 0, 0, behind))  # noqa: A001
        shape = (num_rows * beside, turns) if self.batch_first else (turns, num_rows * beside)
        states = hx if isinstance(hx, tuple) else () if hx is None else (hx,)
        states = tuple(state.repeat(1, beside, 1) for state in states)
        before = states if isinstance(hx, tuple) else next(iter(states), None)
        output, state = run(input.reshape(*shape, input.shape[-1]), before)
        output = output.reshape(*input.shape[:2], output.shape[-1]).narrow(time, 0, num_steps)
        if isinstance(state, tuple):
            return output, tuple(item[:, :num_rows].contiguous() for item in state)
        return output, state[:, :num_rows].contiguous()

    def _without_empty(self, output: Tensor, state: Any, before: Any, empty_B: Tensor) -> Any:
        """Set the output of rows without steps to zeros, and keep their previous state."""
        rows = empty_B[:, None, None] if self.batch_first else empty_B[None, :, None]
        output = output.masked_fill(rows, 0.0)
        states = state if isinstance(state, tuple) else (state,)
        befores = before if isinstance(before, tuple) else (before,) * len(states)
        kept = tuple(
            torch.where(empty_B[None, :, None], torch.zeros_like(new) if old is None else old, new)
            for new, old in zip(states, befores, strict=True)
        )
        return output, kept if isinstance(state, tuple) else kept[0]


def _turns(num_steps: int, about: int) -> int:
    """Return how many steps to run in sequence: half to all of ``about``, with least padding."""
    if num_steps <= about:
        return max(num_steps, 1)
    return min(range((about + 1) // 2, about + 1), key=lambda turns: -num_steps % turns)


def _needs_float32(item: Any) -> bool:
    """Whether an LSTM would run on the CPU in a type for which oneDNN has no LSTM there.

    It has none for float16, and for bfloat16 none on CPUs without AVX-512.
    """
    if not isinstance(item, Tensor) or item.device.type != "cpu":
        return False
    if not torch.is_autocast_enabled("cpu"):
        return False
    dtype = torch.get_autocast_dtype("cpu")
    return dtype == torch.float16 or (dtype == torch.bfloat16 and not _has_bfloat16())


@cache
def _has_bfloat16() -> bool:
    """Whether oneDNN computes in bfloat16 on this CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # pyright: ignore[reportPrivateUsage]


def _of_rows(states: tuple[Tensor, ...], num_rows: int) -> Any:
    """Return the state of the first rows: the last batch of an epoch may have fewer."""
    known = states[0].shape[1]
    if num_rows > known:
        raise ValueError(f"a batch of {num_rows} rows cannot continue from one of {known}")
    first = tuple(item[:, :num_rows].contiguous() for item in states)
    return first if len(states) > 1 else first[0]


class _RNN(Recurrent, nn.RNN):  # pyright: ignore[reportIncompatibleMethodOverride]
    pass


class _LSTM(Recurrent, nn.LSTM):  # pyright: ignore[reportIncompatibleMethodOverride]
    pass


class _GRU(Recurrent, nn.GRU):  # pyright: ignore[reportIncompatibleMethodOverride]
    pass


class _EmbeddingBag(TakesLengths, nn.EmbeddingBag):
    """An EmbeddingBag whose bags are the rows of a padded batch, without the padding.

    Takes the ids, and optionally their weights as a second input.
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input: Tensor,  # noqa: A002 (torch's name)
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        *,
        lengths: Lengths | None = None,
    ) -> Tensor:
        """Reduce each row's embeddings to one, as torch does; ``input``: [B, T] or torch's own."""
        if input.dim() == 2 and per_sample_weights is None:
            offsets, per_sample_weights = None, offsets
        if lengths is None:
            return super().forward(input, offsets, per_sample_weights)
        num_steps = input.shape[1]
        if lengths.are_all(num_steps) and not self.include_last_offset:
            return super().forward(input, None, per_sample_weights)
        index_S, offsets_B = self._places(num_steps, lengths)
        ids_S = input.reshape(-1)[index_S]
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.reshape(-1)[index_S]
        if self.include_last_offset:
            offsets_B = torch.cat([offsets_B, offsets_B.new_tensor([len(index_S)])])
        return super().forward(ids_S, offsets_B, per_sample_weights)

    @staticmethod
    def _places(num_steps: int, lengths: Lengths) -> tuple[Tensor, Tensor]:
        """Return the indices of unpadded steps in the flat batch, and the offset of each row."""
        lengths_B = lengths.of_rows
        total = int(lengths.on_host.sum())
        rows_B = torch.arange(len(lengths_B), device=lengths_B.device) * num_steps
        offsets_B = lengths_B.cumsum(0) - lengths_B
        shift_S = torch.repeat_interleave(rows_B - offsets_B, lengths_B, output_size=total)
        return shift_S + torch.arange(total, device=lengths_B.device), offsets_B


REPLACED: dict[str, type[Any]] = {
    "RNN": _RNN,
    "LSTM": _LSTM,
    "GRU": _GRU,
    "EmbeddingBag": _EmbeddingBag,
}
"""Layers that use lengths, built in place of torch's classes of the same names, with the same
arguments and parameters."""
