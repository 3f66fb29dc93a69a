"""How columns become numbers that a network can learn from: normalised, filled, told apart."""

from typing import Annotated, Literal, Self

from pydantic import Field as Constraint
from pydantic import PositiveInt, model_validator

from glasshouse.spec.strict import Spec, WrongAt, repeated

MAX_CLASSES = 10_000
MAX_CLASS_LENGTH = 200
MAX_GIVEN_TOKENS = 100_000
MAX_VOCABULARY = 1_000_000
NUM_RESERVED = 2
"""The first ids of a vocabulary are no tokens: 0 is padding, 1 what is not in the vocabulary."""

Column = Annotated[str, Constraint(min_length=1, max_length=200)]
Unit = Literal["characters", "words"]
Token = Annotated[str, Constraint(min_length=1, max_length=200)]
Class = (
    Annotated[str, Constraint(max_length=MAX_CLASS_LENGTH)]
    | Annotated[int, Constraint(ge=-(2**63), lt=2**63)]
)
Fill = float | Literal["mean", "median", "NaN"]


class Normalize(Spec):
    """A field's values shifted and divided by figures of the training rows.

    The figures are taken once, from the rows that the job trains on, and are part of every
    checkpoint: validation, inference and a job that goes on use the same.
    """

    type: Literal["standard", "minmax", "mean_normalization"]
    """``standard``: (x - mean) / std. ``minmax``: (x - min) / (max - min), so in [0, 1] on the
    training rows. ``mean_normalization``: (x - mean) / (max - min). Where the training rows have
    one value only it becomes 0, and others are not divided."""
    per: Literal["feature", "all"] = "feature"
    """``feature``: each entry of a row's first axis has figures of its own: a column of a table, a
    channel of an image, an entry of a sequence's vectors. ``all``: one for the whole field."""


class Vocabulary(Spec):
    """Which tokens have an id of their own; 0 is padding and 1 stands for every other token."""

    max_size: int | None = Constraint(default=None, ge=1, le=MAX_VOCABULARY)
    """The most tokens; the most frequent stay. Left out: all that there are."""
    min_count: PositiveInt = 1
    """A token that the training rows have less often than this has no id."""
    given: tuple[Token, ...] | None = Constraint(
        default=None, min_length=1, max_length=MAX_GIVEN_TOKENS
    )
    """The tokens in the order of their ids, from 2 on, instead of those of the training rows."""

    @model_validator(mode="after")
    def _check_given(self) -> Self:
        if self.given is None:
            return self
        for name in ("max_size", "min_count"):
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                detail = f"given is the whole vocabulary: remove {name} ({value})"
                raise WrongAt(name, detail=detail)
        if (again := repeated(self.given)) is not None:
            detail = f"given lists {self.given[again]!r} twice: remove one"
            raise WrongAt("given", again, detail=detail)
        return self


class _Windows(Spec):
    column: Column = "text"
    """A column of texts. The text that runs is that of all its rows, one after the other, with the
    token ``\\n`` behind each."""
    tokens: Unit
    """``characters``; or ``words``: what stands between white space."""
    vocabulary: Vocabulary = Vocabulary()
    """Built from the training rows unless it is given."""


class LanguageModelWindows(_Windows):
    """Blocks of a running text and the same blocks one token later: the next token at each step.

    Gives the columns ``input`` and ``target``, ``length`` tokens each.
    """

    type: Literal["language_model"]
    length: int = Constraint(ge=1, le=1_000_000)
    """Tokens of a block."""
    stride: PositiveInt | None = None
    """From the beginning of a block to that of the next; left out, ``length``: no token twice."""


class CbowWindows(_Windows):
    """Each token of a running text, and the tokens around it, which tell it.

    Gives the columns ``context``, 2 * ``window`` tokens, and ``centre``, one. Tokens too near to an
    end of the text to have all neighbours are in contexts only.
    """

    type: Literal["cbow"]
    window: int = Constraint(default=2, ge=1, le=1000)
    """Tokens on either side."""
    stride: PositiveInt = 1
    """From a centre to the next."""


Windows = Annotated[LanguageModelWindows | CbowWindows, Constraint(discriminator="type")]
