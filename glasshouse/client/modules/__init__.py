"""Conversion of a user's ``nn.Module`` to a graph of layers.

This is the only package of the client that imports torch. It is imported when a module is passed,
so the client works without torch. The service receives only the graph and the weights, never the
code of the module.
"""

import sys
from typing import Any


def is_module(value: Any) -> bool:
    """Whether this is a torch module; imports nothing."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_dataset(value: Any) -> bool:
    """Whether this is a torch dataset; imports nothing."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(value, data.Dataset)
