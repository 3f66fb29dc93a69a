"""Modules as people write them, each with the batches that it takes."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Mlp(nn.Module):
    """Containers within containers, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU()
        )
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 3)})

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["a"](self.body(x))


class LeNet(nn.Module):
    """Functions in the place of layers, and a size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.p = 0.2
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(image)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), kernel_size=(2, 2))
        x = x.view(x.size(0), -1)
        x = F.dropout(F.relu(self.fc1(x)), p=self.p, training=self.training)
        return self.fc3(F.relu(self.fc2(x)))


class Block(nn.Module):
    """As torchvision's: one ReLU that is called twice, in place."""

    def __init__(self, num_in: int, num_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_out)
        self.downsample: nn.Module | None = None
        if stride != 1 or num_in != num_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """A small one of torchvision's form, its first layers frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(Block(8, 8), Block(8, 8))
        self.layer2 = nn.Sequential(Block(8, 16, 2), Block(16, 16))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, 10)
        self.conv1.requires_grad_(False)

    def forward(self, image: Tensor) -> Tensor:
        x = self.layer2(self.layer1(F.relu(self.bn1(self.conv1(image)))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class TwoTowers(nn.Module):
    """Several inputs, one layer for both, and what numbers do to tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.out = nn.Linear(17, 3)

    def forward(self, left: Tensor, right: Tensor, debug: bool = False) -> Tensor:
        a, b = self.tower(left), self.tower(right)
        if debug:
            raise ValueError(a)
        near = F.cosine_similarity(a, b).unsqueeze(1)
        both = torch.cat((a * self.scale, 1 - b, 2 / (a.abs() + 1), near), dim=-1)
        best, _ = both.max(dim=1, keepdim=True)
        return self.out(torch.cat([both, best**2], 1) - both.mean())


class Attention(nn.Module):
    """Written by hand, with a token of its own, learned positions and a mask in a buffer."""

    mask: Tensor

    def __init__(self, width: int = 8, num_heads: int = 2, num_steps: int = 6) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, num_steps + 1, width) * 0.1)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.out = nn.Linear(width, 3)
        causal = torch.tril(torch.ones(num_steps + 1, num_steps + 1))
        self.register_buffer("mask", causal.view(1, 1, num_steps + 1, num_steps + 1))

    def forward(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        x = torch.cat([self.first.expand(num_rows, -1, -1), x], 1) + self.positions
        B, T, D = x.size()
        q, k, v = self.qkv(self.norm(x)).split(D, dim=2)
        k = k.view(B, T, self.num_heads, D // self.num_heads).transpose(1, 2)
        q = q.view(B, T, self.num_heads, -1).transpose(1, 2)
        v = v.view(B, T, self.num_heads, -1).permute(0, 2, 1, 3)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        x = x + self.proj(
            (F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(B, T, D)
        )
        return self.out(x[:, -1])


class LanguageModel(nn.Module):
    """torch's own encoder under a causal mask, the last layer's weight the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.positions = nn.Embedding(32, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, text: Tensor) -> Tensor:
        num_steps = text.size(1)
        x = self.embedding(text) + self.positions(torch.arange(num_steps, device=text.device))
        hidden = torch.triu(torch.ones(num_steps, num_steps, dtype=torch.bool), diagonal=1)
        return self.head(self.encoder(x, mask=hidden)).mean(dim=1)


class PackedLstm(nn.Module):
    """Goes by the lengths of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(20, 3)

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(text)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        packed_output, (hidden, _) = self.lstm(packed)
        output, _ = pad_packed_sequence(packed_output, batch_first=True)
        ends = torch.cat([hidden[-2], hidden[-1]], dim=1)
        return self.fc(torch.cat([ends, output.sum(1)], dim=1))


class PlainGru(nn.Module):
    """Does not know where rows end, and begins with zeros of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.gru = nn.GRU(6, 5, batch_first=True)
        self.fc = nn.Linear(5, 3)

    def forward(self, text: Tensor) -> Tensor:
        start = torch.zeros(1, text.size(0), 5, device=text.device)
        output, _ = self.gru(self.embedding(text), start)
        return self.fc(output[:, -1, :])


class Case(NamedTuple):
    """A module, and what it takes."""

    module: Callable[[], nn.Module]
    fields: dict[str, dict[str, Any]]


IMAGE = {"image": {"type": "dense", "shape": [1, 28, 28]}}
TEXT = {"text": {"type": "integer_sequence", "dim": 11}}


def dense(*shape: int) -> dict[str, Any]:
    return {"type": "dense", "shape": list(shape)}


CASES: dict[str, Case] = {
    "mlp": Case(Mlp, {"x": dense(6)}),
    "sequential": Case(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ELU(), nn.Linear(5, 3)),
        {"x": dense(3, 4)},
    ),
    "lenet": Case(LeNet, IMAGE),
    "residual block": Case(
        lambda: nn.Sequential(Block(1, 4, 2), nn.Flatten(), nn.Linear(64, 3)), {"x": dense(1, 8, 8)}
    ),
    "resnet": Case(ResNet, {"image": dense(1, 12, 12)}),
    "two towers": Case(TwoTowers, {"left": dense(6), "right": dense(6)}),
    "attention": Case(Attention, {"x": dense(6, 8)}),
    "language model": Case(LanguageModel, TEXT),
    "packed lstm": Case(PackedLstm, TEXT),
    "plain gru": Case(PlainGru, TEXT),
}
