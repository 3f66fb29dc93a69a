"""What somebody may like: a tower for the user, one for the item, and how well they agree."""

from typing import Annotated

from pydantic import Field as Constraint

from glasshouse.spec.network import Graph, Layer
from glasshouse.spec.presets.drawing import Size, Source, layer
from glasshouse.spec.strict import Spec


class Recommender(Spec):
    """Two towers over sparse features (Covington et al., 2016); the score is their dot product.

    Reads two sparse fields (or sequences of ids); the output ``score`` has the shape [rows, 1].
    """

    user: Source = "user"
    """The field of the user's features."""
    item: Source = "item"
    """The field of the item's features."""
    embedding_dim: Size = 64
    """The width of a feature's vector, and of what the towers put out."""
    hidden: Annotated[tuple[Size, ...], Constraint(max_length=50)] = (128,)
    """Widths of each tower's hidden layers."""
    sparse: bool = True
    """Update only the rows of the features of a batch; for SGD and Adagrad."""


def recommender(args: Recommender) -> Graph:
    """Each tower sums the vectors of its features, and ends as wide as the other."""
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
