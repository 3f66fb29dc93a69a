"""The word embedding model of PaddlePaddle's FAQ: predicts a word from its neighbors."""

from glasshouse.spec.network import Graph
from glasshouse.spec.presets.layers import Size, Source, layer
from glasshouse.spec.strict import Spec


class Cbow(Spec):
    """Continuous bag of words (Mikolov et al., 2013): scores from the sum of the context vectors.

    Reads the ids of the neighbors, as a field of fixed shape or a sequence.
    """

    context: Source = "context"
    """The field with the neighbors' ids."""
    num_words: Size = 3000
    """Size of the vocabulary; ids are in [0, num_words)."""
    embedding_dim: Size = 256
    """Size of the word vectors."""
    sparse: bool = True
    """Whether a step updates only the embedding rows of the words in the batch. ``optimizer`` or
    ``optimizer.sparse`` must then be SGD, Adagrad or SparseAdam."""


def cbow(args: Cbow) -> Graph:
    """A score for each word of the vocabulary."""
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
