"""Counter-based random numbers for rows: each is a function of its key, row and index.

A row's numbers depend on a key and on the row's number, not on the row's batch or on what was drawn
before. So a batch can be created again, in parts, in advance or after a crash.
Shape suffixes: B = rows of a batch, K = numbers of a row.
"""

import hashlib
import math

import torch
from torch import Tensor

_STRIDE = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_DIGITS = 53


def key_of(*parts: object) -> int:
    """Hash the parts to 64 bits."""
    text = "/".join(map(str, parts)).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class RowRandom:
    """A stream of random numbers for each row of a batch."""

    def __init__(self, key: int, rows_B: Tensor) -> None:
        """``rows_B``: the row numbers, int64, in host memory."""
        self._states_B = _mixed(rows_B * _STRIDE + key)
        self._drawn = 0

    def uniform(self, number: int, device: torch.device | None = None) -> Tensor:
        """Return the next ``number`` values per row, uniform in [0, 1): float64 [B, number]."""
        return (self._bits(number, device) >> 11 & ((1 << _DIGITS) - 1)).double() * 2.0**-_DIGITS

    def normal(self, number: int, device: torch.device) -> Tensor:
        """Return the next ``number`` values per row, standard normal: float32 [B, number]."""
        centred = self.uniform(number, device) * 2 - (1 - 2.0**-_DIGITS)
        return (centred.erfinv() * math.sqrt(2)).float()

    def _bits(self, number: int, device: torch.device | None) -> Tensor:
        first = self._drawn + 1
        self._drawn += number
        counters_K = torch.arange(first, first + number, device=device) * _STRIDE
        return _mixed(self._states_B.to(device)[:, None] + counters_K)


def _mixed(bits: Tensor) -> Tensor:
    """Mix the bits: each depends on all others (splitmix64: Steele, Lea and Flood, 2014)."""
    bits = (bits ^ _shifted(bits, 30)) * _FACTORS[0]
    bits = (bits ^ _shifted(bits, 27)) * _FACTORS[1]
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, places: int) -> Tensor:
    """Shift right, with zeros from the left: torch's shift keeps the sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def between(ends: tuple[float, float], uniform: Tensor) -> Tensor:
    """Scale numbers from [0, 1) to a range."""
    return ends[0] + (ends[1] - ends[0]) * uniform
