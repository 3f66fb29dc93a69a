"""A two-tower recommender: one tower for the user, one for the item."""

from typing import Annotated

from pydantic import Field as Constraint

from glasshouse.spec.network import Graph, Layer
from glasshouse.spec.presets.layers import Size, Source, layer
from glasshouse.spec.strict import Spec


class Recommender(Spec):
    """Two towers over sparse features (Covington et al., 2016). The score is their dot product.

    Reads two sparse fields, or sequences of ids. The output ``score`` has the shape [rows, 1].
    """

    user: Source = "user"
    """The field with the user's features."""
    item: Source = "item"
    """The field with the item's features."""
    embedding_dim: Size = 64
    """Size of the feature vectors and of the towers' outputs."""
    hidden: Annotated[tuple[Size, ...], Constraint(max_length=50)] = (128,)
    """Widths of the hidden layers of each tower."""
    sparse: bool = True
    """Whether a step updates only the embedding rows of the features in the batch. ``optimizer`` or
    ``optimizer.sparse`` must then be SGD, Adagrad or SparseAdam."""


def recommender(args: Recommender) -> Graph:
    """Each tower sums the vectors of its features; both towers have outputs of the same width."""
    return Graph(
        layers=(
            *_tower("user", args.user, args),
            *_tower("item", args.item, args),
            layer("agreement", "mul", "user_out", "item_out"),
            layer("score", "sum", dim=1, keepdim=True),
        )
    )


def _tower(side: str, field: str, args: Recommender) -> list[Layer]:
    layers = [
        layer(
            f"{side}_embedding",
            "EmbeddingBag",
            field,
            embedding_dim=args.embedding_dim,
            mode="sum",
            sparse=args.sparse,
        )
    ]
    for number, width in enumerate(args.hidden, start=1):
        layers += [
            layer(f"{side}_fc{number}", "Linear", out_features=width),
            layer(f"{side}_relu{number}", "ReLU"),
        ]
    return [*layers, layer(f"{side}_out", "Linear", out_features=args.embedding_dim)]
