"""torchvision's own functions, as the second path; tests that want them are skipped without it."""

import importlib.metadata
from typing import Any

import pytest
import torch


def functional() -> Any:
    """Torchvision's functional transforms of one image.

    The wheel of PyPI is of CUDA and cannot be imported beside torch for the CPU, unless the two
    operators that it describes are there.
    """
    try:
        version = importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torchvision is not installed")
    if torch.version.cuda is None and not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
    return pytest.importorskip("torchvision.transforms.functional", reason=version)


_KEPT: list[Any] = []
