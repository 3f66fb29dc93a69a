"""The networks of ``bench.training.accelerator`` in plain torch, and how their batches are made.

Their parameters are in the order of the engine's layers, so that they can start from its weights.

Shape suffixes: B = rows, T = steps of a row, D = width, V = ids, N = rows of the dataset.
"""

import inspect
import itertools
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class GptBlock(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.ln_1 = nn.LayerNorm(width)
        self.c_attn = nn.Linear(width, 3 * width)
        self.attn_proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        parts = self.c_attn(self.ln_1(x_BTD)).chunk(3, dim=2)
        query, key, value = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in parts
        )
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = x_BTD + self.attn_proj(found.transpose(1, 2).flatten(2))
        return x_BTD + self.c_proj(F.gelu(self.c_fc(self.ln_2(x_BTD))))


class Gpt(nn.Module):
    """GPT-2; its output layer has the weight of the embedding."""

    def __init__(
        self, num_tokens: int, block_size: int, num_layers: int, num_heads: int, width: int
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(num_tokens, width)
        self.wpe = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(GptBlock(width, num_heads) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        steps_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.wte(tokens_BT) + self.wpe(steps_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return F.linear(self.ln_f(x_BTD), self.wte.weight)


class ResnetBlock(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = (
            nn.Sequential(
                nn.Conv2d(before, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )
            if stride > 1
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        found = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(found + self.downsample(x))


class Resnet18(nn.Module):
    """ResNet-18."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        widths = (64, 64, 128, 256, 512)
        self.blocks = nn.ModuleList(
            ResnetBlock(widths[stage] if number else widths[stage - 1], widths[stage], stride)
            for stage in range(1, 5)
            for number, stride in enumerate((2 if stage > 1 else 1, 1))
        )
        self.fc = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        return self.fc(x.mean(dim=(2, 3)))


def loss_of_tokens(scores_BTV: Tensor, next_BT: Tensor) -> Tensor:
    """Return the mean over all steps."""
    return F.cross_entropy(scores_BTV.float().flatten(0, 1), next_BT.flatten())


def loss_of_images(scores: Tensor, labels_B: Tensor) -> Tensor:
    """Return the mean over the rows."""
    return F.cross_entropy(scores.float(), labels_B)


def batch_of_tokens(columns: Mapping[str, Tensor], rows_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and next ids."""
    tokens, following = (columns[name].index_select(0, rows_B) for name in ("tokens", "next"))
    return tokens.long(), following.long()


def batch_of_images(columns: Mapping[str, Tensor], rows_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return images, from 0 to 1, and labels."""
    images = columns["image"].index_select(0, rows_B).float().div_(255)
    return images, columns["label"].index_select(0, rows_B)


def orders(num_rows: int, seed: int, device: torch.device) -> Iterator[Tensor]:
    """Yield the order of the rows of each epoch, as the engine draws it."""
    for epoch in itertools.count():
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        yield torch.randperm(num_rows, generator=generator).to(device)


def parallelized(network: nn.Module, strategy: str, device: torch.device) -> nn.Module:
    """Return the network as several processes train it, with torch's own wrappers."""
    if strategy == "data":
        known = inspect.signature(DistributedDataParallel).parameters
        # renamed in torch 2.13
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        return DistributedDataParallel(network, gradient_as_bucket_view=True, **{buffers: False})
    if strategy == "fsdp":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in network.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(network, mesh=mesh)
    return network
