"""The word model of PaddlePaddle's FAQ: which word stands between its neighbours."""

from glasshouse.spec.network import Graph
from glasshouse.spec.presets.drawing import Size, Source, layer
from glasshouse.spec.strict import Spec


class Cbow(Spec):
    """Continuous bag of words (Mikolov et al., 2013): the sum of the neighbours' vectors, scored.

    Reads the ids of the neighbours, a field of fixed shape or a sequence.
    """

    context: Source = "context"
    """The field of the neighbours' ids."""
    num_words: Size = 3000
    """Words of the dictionary: ids are below it."""
    embedding_dim: Size = 256
    sparse: bool = True
    """Update only the rows of the words of a batch; for SGD and Adagrad."""


def cbow(args: Cbow) -> Graph:
    """A score for each word of the dictionary."""
    return Graph(
        layers=(
            layer(
                "embedding",
                "EmbeddingBag",
                args.context,
                num_embeddings=args.num_words,
                embedding_dim=args.embedding_dim,
                mode="sum",
                sparse=args.sparse,
            ),
            layer("fc", "Linear", out_features=args.num_words),
        )
    )
