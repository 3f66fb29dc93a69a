"""Batch normalization over the rows of all processes of a job, on every device.

torch's ``nn.SyncBatchNorm`` refuses CPU tensors. The formulas are the same.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]


class SyncBatchNorm(_BatchNorm):
    """Normalizes each channel by the mean and variance over all rows of a batch.

    With several processes, these are the rows of all of them. Takes [batch, channels, ...].
    """

    has_rows = True
    """Whether the rows of this process count: a process without a row runs another's."""
    num_peers = 1
    """How many processes have the same rows as this one, with itself."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        """The arguments are those of ``nn.SyncBatchNorm``, without ``process_group``."""
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 (torch's name)
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, and the input has {input.dim()}")

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Normalize. Collective in training."""
        if not self.training or not dist.is_initialized():
            return super().forward(x)
        self._check_input_dim(x)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        wide = x.float()
        rows = wide if self.has_rows else 0 * wide
        count = torch.tensor([float(self.has_rows) * x.numel() / x.shape[1]], device=x.device)
        sums_C1 = all_reduce(torch.cat([rows.sum(axes), count]) / self.num_peers)
        count = sums_C1[-1].detach()
        if count <= 1:
            raise ValueError("expected more than 1 value per channel over all processes")
        mean_C = sums_C1[:-1] / count
        centered = wide - self._along(mean_C, x)
        squares = centered.square() if self.has_rows else 0 * centered
        variance_C = all_reduce(squares.sum(axes) / self.num_peers) / count
        self._track(mean_C.detach(), variance_C.detach() * count / (count - 1))
        found = centered * self._along(torch.rsqrt(variance_C + self.eps), x)
        if self.affine:
            found = found * self._along(self.weight, x) + self._along(self.bias, x)
        return found.to(x.dtype)

    def _along(self, values_C: Tensor, like: Tensor) -> Tensor:
        return values_C.reshape(1, -1, *([1] * (like.dim() - 2)))

    @torch.no_grad()
    def _track(self, mean_C: Tensor, variance_C: Tensor) -> None:
        """Update the running statistics as torch does; a momentum of None averages all batches."""
        if self.running_mean is None or self.running_var is None:
            return
        if self.num_batches_tracked is None:
            raise RuntimeError("the number of batches is not tracked")
        self.num_batches_tracked.add_(1)
        rate = self.momentum
        if rate is None:
            rate = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean_C, rate)
        self.running_var.lerp_(variance_C, rate)


LAYERS: dict[str, type[nn.Module]] = {"SyncBatchNorm": SyncBatchNorm}
