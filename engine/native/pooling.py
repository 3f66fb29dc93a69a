"""Max pooling followed by ReLU as one native operation, for the channels_last memory format.

torch reads and writes such images several times, and stores the index of each maximum in eight
bytes for the backward pass. Here each value is read once, and an index is one byte. Outputs and
gradients equal torch's bit for bit, except for the payload of a NaN. Like all native code it is
optional.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from engine.native.compiling import LIBRARY, SOURCE, NotCompiled, open_library
from engine.native.threads import lend_threads

TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The number of each dtype in the source."""
Sizes = tuple[int, ...]
"""Images, height, width, channels, then window and stride, rows before columns."""
_BEST = -1
_MOST_PLACES = 255
_Sizes = ctypes.c_int64 * 8


def _open() -> ctypes.CDLL | None:
    try:
        library = open_library(SOURCE.with_name(LIBRARY))
    except NotCompiled:
        return None
    lend_threads(library)
    pointers = [ctypes.c_void_p] * 4
    numbers = [ctypes.c_int32] * 3
    library.glasshouse_pool_forward.argtypes = [*pointers, *numbers]
    library.glasshouse_pool_backward.argtypes = [*pointers, *numbers]
    return library


LOADED = _open()


def takes(pool: nn.MaxPool2d, x: Tensor) -> bool:
    """Whether the kernel is loaded and supports this pooling of these images.

    It supports float32 and bfloat16 on the CPU in ``channels_last``, and windows that neither
    overlap nor reach past the image.
    """
    return (
        LOADED is not None
        and x.dtype in TYPES
        and x.is_cpu
        and x.dim() == 4
        and x.is_contiguous(memory_format=torch.channels_last)
        and fits(pool, x.shape[2:])
    )


def fits(pool: nn.MaxPool2d, size: torch.Size) -> bool:
    """Whether the windows of a pooling do not overlap and fit into images of a size."""
    window, stride = _both(pool.kernel_size), _both(pool.stride)
    return (
        not pool.ceil_mode
        and _both(pool.padding) == (0, 0)
        and _both(pool.dilation) == (1, 1)
        and all(step >= width for step, width in zip(stride, window, strict=True))
        and all(width <= side for width, side in zip(window, size, strict=True))
        and window[0] * window[1] < _MOST_PLACES
    )


def _both(size: int | tuple[int, ...]) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size)


def relu_of_max_pool2d(pool: nn.MaxPool2d, x: Tensor, *, isa: int = _BEST) -> Tensor:
    """Return ReLU(max_pool2d(x)) for x of shape [N, C, H, W], for which ``takes`` is true."""
    num, channels, height, width = x.shape
    (rows, columns), (down, right) = _both(pool.kernel_size), _both(pool.stride)
    sizes = (num, height, width, channels, rows, columns, down, right)
    return _PoolRelu.apply(x, sizes, isa)  # pyright: ignore[reportReturnType]


class _PoolRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sizes, isa: int) -> Tensor:
        num, height, width, channels, rows, columns, down, right = sizes
        out = _images(
            x, (num, channels, (height - rows) // down + 1, (width - columns) // right + 1)
        )
        places = torch.empty(out.numel(), dtype=torch.uint8)
        pointers = (x.data_ptr(), out.data_ptr(), places.data_ptr())
        _library().glasshouse_pool_forward(_Sizes(*sizes), *pointers, *_how(x, isa))
        ctx.save_for_backward(places)
        ctx.sizes, ctx.isa = sizes, isa
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides names
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        num, height, width, channels = ctx.sizes[:4]
        grad = grads[0].contiguous(memory_format=torch.channels_last)
        x_grad = _images(grad, (num, channels, height, width))
        pointers = (grad.data_ptr(), places.data_ptr(), x_grad.data_ptr())
        _library().glasshouse_pool_backward(_Sizes(*ctx.sizes), *pointers, *_how(grad, ctx.isa))
        return x_grad, None, None


def _images(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    layout = torch.channels_last
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)


def _how(x: Tensor, isa: int) -> tuple[int, int, int]:
    return TYPES[x.dtype], isa, torch.get_num_threads()


def _library() -> ctypes.CDLL:
    assert LOADED is not None  # noqa: S101 - `takes` has said so
    return LOADED
