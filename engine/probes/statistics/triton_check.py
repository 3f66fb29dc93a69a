"""Check whether the Triton kernel can be used for the statistics of CUDA tensors.

Triton compiles for the present device, with a C compiler and Python's headers. If any of these is
missing, or the kernel's results differ from plain torch, plain torch is used: the same statistics
with some thirty launches instead of two. ``python -m engine.probes.statistics.triton_check`` prints
which of the two this machine uses.
"""

import sys
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from engine.probes.statistics import plain_torch

if TYPE_CHECKING:
    from engine.probes.statistics.triton_kernel import TritonKernel

_SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-45, -6e4, 1.5)
_NUM_TRIED = 10_000


class NotUsable(Exception):
    """The kernel cannot be used; the message says why."""


@cache
def kernel_for(device: torch.device) -> "TritonKernel | None":
    """Return the kernel for a device; None, and one line to stderr, if it is not usable."""
    try:
        return tried(device)
    except NotUsable as reason:
        sys.stderr.write(f"glasshouse: statistics on {device} take the plain path: {reason}\n")
        return None


def tried(device: torch.device) -> "TritonKernel":
    """Return the kernel after comparing its statistics of a tensor with those of plain torch.

    Raises:
        NotUsable: there is no Triton, it cannot compile here, or its results are wrong.
    """
    if find_spec("triton") is None:
        raise NotUsable("Triton is not installed")
    x = torch.randn(_NUM_TRIED, generator=torch.Generator().manual_seed(0))
    x[: len(_SPECIAL)] = torch.tensor(_SPECIAL)
    x = x.to(device)
    try:
        from engine.probes.statistics.triton_kernel import TritonKernel  # noqa: PLC0415 - optional

        kernel = TritonKernel()
        counted, counts = kernel.count(x)
        found = [kernel.one(x), *kernel.many([x, x]), counted]
        expected = plain_torch.figures_on_device(x)
        agree = torch.equal(counts, plain_torch.counts_on_device(x)) and all(
            torch.allclose(figures, expected, rtol=1e-9, atol=1e-12, equal_nan=True)
            for figures in found
        )
    except Exception as error:
        raise NotUsable(f"{type(error).__name__}: {shortened(str(error))}") from error
    if not agree:
        raise NotUsable("the Triton kernel gives other figures than torch")
    return kernel


def shortened(message: str) -> str:
    """Return the first and the last line of a message: Triton says at the end what is wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    return " … ".join(dict.fromkeys((lines[0][:300], lines[-1][:300])))


def main() -> int:
    """Print which path is used."""
    if not torch.cuda.is_available():
        sys.stdout.write("there is no CUDA device\n")
        return 1
    try:
        tried(torch.device("cuda"))
    except NotUsable as reason:
        sys.stdout.write(f"{reason}\n")
        return 1
    sys.stdout.write("compiled by Triton\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
