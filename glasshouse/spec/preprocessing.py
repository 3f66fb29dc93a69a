"""Preparation of columns: normalization, missing values, classes, vocabularies, text windows."""

from typing import Annotated, Literal, Self

from pydantic import Field as Constraint
from pydantic import PositiveInt, model_validator

from glasshouse.spec.strict import Spec, WrongAt, repeated

MAX_CLASSES = 10_000
MAX_CLASS_LENGTH = 200
MAX_GIVEN_TOKENS = 100_000
MAX_VOCABULARY = 1_000_000
NUM_RESERVED = 2
"""The ids at the start of a vocabulary that are not tokens: 0 is padding, 1 is every unknown
token."""

Column = Annotated[str, Constraint(min_length=1, max_length=200)]
Unit = Literal["characters", "words"]
Token = Annotated[str, Constraint(min_length=1, max_length=200)]
Class = (
    Annotated[str, Constraint(max_length=MAX_CLASS_LENGTH)]
    | Annotated[int, Constraint(ge=-(2**63), lt=2**63)]
)
Fill = float | Literal["mean", "median", "NaN"]


class Normalize(Spec):
    """Shifts and scales the values of a field by statistics of the training rows.

    The statistics are computed once, from the rows that the job trains on, and stored in every
    checkpoint. Validation, inference and resumed jobs use the same statistics.
    """

    type: Literal["standard", "minmax", "mean_normalization"]
    """``standard``: (x - mean) / std. ``minmax``: (x - min) / (max - min), which is in [0, 1] on
    the training rows. ``mean_normalization``: (x - mean) / (max - min). A feature with only one
    value in the training rows is shifted and not divided."""
    per: Literal["feature", "all"] = "feature"
    """``feature``: separate statistics for each entry of a row's first axis, such as a column of a
    table, a channel of an image or an entry of a sequence's vectors. ``all``: one set of statistics
    for the whole field."""


class Vocabulary(Spec):
    """The tokens with ids of their own. Id 0 is padding, and id 1 is every other token."""

    max_size: int | None = Constraint(default=None, ge=1, le=MAX_VOCABULARY)
    """Maximum number of tokens; the most frequent ones are kept. Default: no limit. Example:
    ``20000``."""
    min_count: PositiveInt = 1
    """Minimum number of occurrences in the training rows. Rarer tokens have no id of their own."""
    given: tuple[Token, ...] | None = Constraint(
        default=None, min_length=1, max_length=MAX_GIVEN_TOKENS
    )
    """The tokens in the order of their ids, from 2 on, instead of those of the training rows. Not
    together with ``max_size`` or ``min_count``. Example: ``["the", "a"]``."""

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
    """A column of texts. The texts of all rows are concatenated, with the token ``\\n`` after each
    row."""
    tokens: Unit
    """How texts are split into tokens: ``characters``, or ``words`` separated by white space."""
    vocabulary: Vocabulary = Vocabulary()
    """The vocabulary. Default: all tokens of the training rows."""


class LanguageModelWindows(_Windows):
    """Blocks of consecutive tokens of a text, with the next token as the target of each step.

    Rows have the columns ``input`` and ``target``, each of ``length`` tokens; ``target`` is
    ``input`` shifted by one token.
    """

    type: Literal["language_model"]
    """Selects language model windows."""
    length: int = Constraint(ge=1, le=1_000_000)
    """Number of tokens in a block. Example: ``64``."""
    stride: PositiveInt | None = None
    """Number of tokens from the start of one block to the start of the next. Default: ``length``,
    so that blocks do not overlap. Example: ``32``."""


class CbowWindows(_Windows):
    """Each token of a text, with its surrounding tokens as context (continuous bag of words).

    Rows have the columns ``context``, of 2 * ``window`` tokens, and ``centre``, of one. Tokens with
    fewer neighbors, at the ends of the text, are part of contexts only.
    """

    type: Literal["cbow"]
    """Selects continuous bag-of-words windows."""
    window: int = Constraint(default=2, ge=1, le=1000)
    """Number of context tokens on each side."""
    stride: PositiveInt = 1
    """Number of tokens from one center to the next."""


Windows = Annotated[LanguageModelWindows | CbowWindows, Constraint(discriminator="type")]
