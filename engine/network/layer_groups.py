"""Which layers of a network have their parameters gathered together, if processes shard them.

A message of few bytes takes as long as one of many, so consecutive layers form groups.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules inside of a layer that are gathered by themselves."""
_GROUP_BYTES = 25 * 2**20
"""A message of this size is not slower than several (as torch's buckets of gradients are)."""
_MIN_GROUPS, _MAX_GROUPS = 8, 32


@dataclass(frozen=True)
class LayerGroups:
    """The parameters of a network by what gathers them."""

    ends: list[int]
    """Of each group of items, the position after its last one. The parameters of the group are
    gathered together, but those of modules that are ``apart`` or ``kept``."""
    sizes: list[int]
    """Of each group, the bytes of the parameters that are gathered with it."""
    apart: list[nn.Module]
    """Modules that are gathered by themselves: blocks of transformers, and layers that run at
    several places."""
    kept: list[nn.Module]
    """Layers whose parameters are gathered for the whole pass."""

    @property
    def gathered_bytes(self) -> int:
        """The most bytes of parameters and gradients that a process has whole at once.

        While a group computes its gradients, the parameters of the next one are gathered.
        """
        first, second, *_ = [*sorted([*self.sizes, *map(_bytes, self.apart)], reverse=True), 0, 0]
        return 2 * (first + sum(map(_bytes, self.kept))) + second


def layer_groups(items: Sequence[Sequence[nn.Module]]) -> LayerGroups:
    """Divide what a network runs into groups; ``items``: the layers of each item, in order.

    A group ends before it has 25 MiB of parameters, or a 32nd of those of a large network, or an
    eighth of those of a small one; an item that is larger is a group.

    Layers of types that are not torch's may return their parameters or views of them, whose memory
    must stay until the end of the backward pass.
    """
    counts = Counter(module for item in items for module in item)
    distinct = [module for module in counts if _bytes(module)]
    kept = [module for module in distinct if not _is_of_torch(module)]
    blocks = [one for x in distinct for one in x.modules() if isinstance(one, BLOCKS)]
    again = [module for module in distinct if counts[module] > 1 and module not in kept]
    found = LayerGroups([], [], list(dict.fromkeys([*blocks, *again])), kept)
    total = sum(_bytes(module) for module in distinct)
    limit = max(total // _MAX_GROUPS, min(_GROUP_BYTES, total // _MIN_GROUPS))
    without = {*found.apart, *kept}
    for position, item in enumerate(items):
        size = sum(_bytes(module, without) for module in item)
        if not found.ends or (size and found.sizes[-1] and found.sizes[-1] + size > limit):
            found.ends.append(position)
            found.sizes.append(0)
        found.ends[-1] = position + 1
        found.sizes[-1] += size
    return found


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _bytes(module: nn.Module, without: Collection[nn.Module] = ()) -> int:
    return sum(item.nbytes for item in dict.fromkeys(_parameters(module, without)))


def _parameters(module: nn.Module, without: Collection[nn.Module]) -> Iterator[Tensor]:
    """Yield the parameters of a module, but those of some modules in it."""
    if module in without:
        return
    yield from module.parameters(recurse=False)
    for child in module.children():
        yield from _parameters(child, without)
