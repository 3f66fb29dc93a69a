"""A user's own ``nn.Module`` as a graph of layers. The only torch in the client.

Everything here is imported when a module is given, and not before: the client needs no torch. The
service never sees the module's code, only the graph and the weights.
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
