"""The networks of ``bench.service.serving`` in plain torch, their requests and their answers.

Imports nothing but torch and safetensors: the environment of LitServe has nothing else.

Shape suffixes: B = rows, T = steps of a row, D = width, C = classes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

NUM_TOKENS, WIDTH, NUM_HEADS, NUM_BLOCKS, MAX_LENGTH = 5000, 64, 4, 2, 128


class MnistCnn(nn.Module):
    """The preset ``mnist_cnn``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5, padding=2)
        self.conv2 = nn.Conv2d(20, 20, 5, padding=2)
        self.fc = nn.Linear(980, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


class Block(nn.Module):
    """A block of the preset ``transformer_classifier``."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.attn_proj = nn.Linear(WIDTH, WIDTH)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor, mask: Tensor | None) -> Tensor:
        parts = self.c_attn(self.ln_1(x_BTD)).chunk(3, dim=2)
        heads = (part.unflatten(2, (NUM_HEADS, -1)).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        x_BTD = x_BTD + self.attn_proj(found.transpose(1, 2).flatten(2))
        return x_BTD + self.c_proj(F.gelu(self.c_fc(self.ln_2(x_BTD))))


class TransformerClassifier(nn.Module):
    """The preset ``transformer_classifier``; padded rows come with their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        self.positions = nn.Embedding(MAX_LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.fc = nn.Linear(WIDTH, 2)

    def forward(self, ids_BT: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        steps_T = torch.arange(ids_BT.shape[1])
        x_BTD = self.embedding(ids_BT) + self.positions(steps_T)
        if lengths_B is None:  # nothing is padded
            for block in self.blocks:
                x_BTD = block(x_BTD, None)
            return self.fc(self.norm(x_BTD).mean(1))
        real_BT = steps_T < lengths_B[:, None]
        for block in self.blocks:
            x_BTD = block(x_BTD, real_BT[:, None, None])
        summed_BD = (self.norm(x_BTD) * real_BT[..., None]).sum(1)
        return self.fc(summed_BD / lengths_B[:, None])


def load(name: str, weights: str) -> nn.Module:
    """Return the trained network, ready to predict."""
    network = {"mnist_cnn": MnistCnn, "transformer_classifier": TransformerClassifier}[name]()
    named = load_file(weights)
    for number in range(NUM_BLOCKS):  # block0_ln_1.weight is blocks.0.ln_1.weight here
        prefix = f"block{number}_"
        named = {key.replace(prefix, f"blocks.{number}."): x for key, x in named.items()}
    network.load_state_dict(named)
    return network.eval()


def joined(rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the arguments of a network for rows: images, or padded ids and their lengths."""
    if rows[0].is_floating_point():
        return (torch.stack([*rows]),)
    lengths = torch.tensor([len(row) for row in rows])
    return nn.utils.rnn.pad_sequence([*rows], batch_first=True), lengths


def answer(scores_BC: Tensor) -> dict[str, Any]:
    """Return the scores, classes and probabilities, as the answer of Glasshouse has them."""
    prob_B, id_B = scores_BC.softmax(1).max(1)
    found = {"fc/value": scores_BC, "fc/id": id_B, "fc/prob": prob_B}
    return {"outputs": {name: values.tolist() for name, values in found.items()}}
