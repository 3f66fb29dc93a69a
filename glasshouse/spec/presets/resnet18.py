"""A residual network for images."""

from glasshouse.spec.network import Graph, Layer
from glasshouse.spec.presets.layers import Size, layer
from glasshouse.spec.strict import Spec


class Resnet18(Spec):
    """ResNet-18 (He et al., 2015): 11,689,512 parameters for 3 channels and 1000 classes.

    Layers have torchvision's names, with ``_`` instead of the dot: ``layer1_0_conv1``.
    """

    num_classes: Size = 1000
    """Number of classes."""


def resnet18(args: Resnet18) -> Graph:
    """A stem, four stages of two blocks, the mean over the image, and scores."""
    layers: list[Layer] = [
        _conv("conv1", 64, kernel_size=7, stride=2),
        layer("bn1", "BatchNorm2d"),
        layer("relu", "ReLU"),
        layer("maxpool", "MaxPool2d", kernel_size=3, stride=2, padding=1),
    ]
    for stage, channels in enumerate((64, 128, 256, 512), start=1):
        for block in range(2):
            stride = 2 if stage > 1 and block == 0 else 1
            layers += _block(f"layer{stage}_{block}", layers[-1].name, channels, stride)
    layers += [
        layer("avgpool", "AdaptiveAvgPool2d", output_size=1),
        layer("flat", "Flatten"),
        layer("fc", "Linear", out_features=args.num_classes),
    ]
    return Graph(layers=tuple(layers))


def _block(name: str, before: str, channels: int, stride: int) -> list[Layer]:
    """Two convolutions with a residual connection, which is a projection if the sizes differ."""
    layers = [
        _conv(f"{name}_conv1", channels, before, stride=stride),
        layer(f"{name}_bn1", "BatchNorm2d"),
        layer(f"{name}_relu1", "ReLU"),
        _conv(f"{name}_conv2", channels),
        layer(f"{name}_bn2", "BatchNorm2d"),
    ]
    shortcut = before
    if stride > 1:
        shortcut = f"{name}_downsample_1"
        layers += [
            _conv(f"{name}_downsample_0", channels, before, kernel_size=1, stride=stride),
            layer(shortcut, "BatchNorm2d"),
        ]
    return [
        *layers,
        layer(f"{name}_add", "add", f"{name}_bn2", shortcut),
        layer(f"{name}_relu", "ReLU"),
    ]


def _conv(name: str, channels: int, *inputs: str, kernel_size: int = 3, stride: int = 1) -> Layer:
    return layer(
        name,
        "Conv2d",
        *inputs,
        out_channels=channels,
        kernel_size=kernel_size,
        stride=stride,
        padding=kernel_size // 2,
        bias=False,
    )
