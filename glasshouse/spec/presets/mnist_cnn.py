"""The network of PaddlePaddle's MNIST notes."""

from glasshouse.spec.network import Graph
from glasshouse.spec.presets.layers import Size, layer
from glasshouse.spec.strict import Spec


class MnistCnn(Spec):
    """Two convolutions and a linear layer, as in PaddlePaddle's MNIST notes.

    It has 20,350 parameters for images of 1 x 28 x 28.
    """

    channels: Size = 20
    """Output channels of both convolutions."""
    num_classes: Size = 10
    """Number of classes."""


def mnist_cnn(args: MnistCnn) -> Graph:
    """Scores of the classes, without a softmax: torch's cross entropy includes it."""
    return Graph(
        layers=(
            layer("conv1", "Conv2d", out_channels=args.channels, kernel_size=5, padding=2),
            layer("relu1", "ReLU"),
            layer("pool1", "MaxPool2d", kernel_size=2),
            layer("conv2", "Conv2d", out_channels=args.channels, kernel_size=5, padding=2),
            layer("relu2", "ReLU"),
            layer("pool2", "MaxPool2d", kernel_size=2),
            layer("flat", "Flatten"),
            layer("fc", "Linear", out_features=args.num_classes),
        )
    )
