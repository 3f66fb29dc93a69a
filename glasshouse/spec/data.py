"""Where batches come from: datasets, splits, and the fields that read their columns."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field as Constraint
from pydantic import PositiveInt, model_validator

from glasshouse.spec.augmenting import Augment
from glasshouse.spec.preparing import (
    MAX_CLASSES,
    Class,
    Column,
    Fill,
    Normalize,
    Unit,
    Vocabulary,
    Windows,
)
from glasshouse.spec.strict import Name, Spec, WrongAt, check_at_most_one, repeated

IMAGES = "images.zip"
FORMATS = (
    *("csv", "tsv", "jsonl", "parquet", "npz", "npy"),
    *("idx", "idx.gz", "idx.zip", "mnist.json.gz", "text", IMAGES),
)
"""What a dataset's file may be."""
TABLES = {"csv": ",", "tsv": "\t"}
"""Formats that are tables of text, whose first row may be a header, and what separates cells."""
BUILTINS = ("digits",)
"""Datasets that come with the service."""
SIZE = r"^[1-9][0-9]{0,3}x[1-9][0-9]{0,3}$"
"""A height and a width in pixels, as in ``32x48``."""


def size_of(text: str) -> tuple[int, int]:
    """Read a height and a width.

    Raises:
        ValueError: the text is something else.
    """
    if re.fullmatch(SIZE, text) is None:
        raise ValueError(f"{text[:40]!r} is no size: give height x width, as in 32x48")
    height, width = text.split("x")
    return int(height), int(width)


class Source(Spec):
    """Rows of one dataset."""

    dataset: str = Constraint(min_length=1, max_length=500)
    """A dataset's id (``ds_…``) or name. Without the service: ``digits``, or the path of a data
    file."""
    split: str = Constraint(default="all", min_length=1, max_length=64)
    """A split that the dataset has; a file without splits has the one split ``all``."""
    fraction: tuple[float, float] | None = None
    """``[0, 0.8]``: that part of the split's rows, in an order drawn from the job's seed.

    Two sources with ``[0, 0.8]`` and ``[0.8, 1]`` of one split share no row and miss none.
    """

    @model_validator(mode="after")
    def _check_fraction(self) -> Self:
        if self.fraction is not None and not 0 <= self.fraction[0] < self.fraction[1] <= 1:
            detail = "fraction must be [from, to] with 0 <= from < to <= 1"
            raise WrongAt("fraction", detail=f"{detail} (got {[*self.fraction]})")
        return self


Sources = Source | Annotated[tuple[Source, ...], Constraint(min_length=1, max_length=100)]
"""Rows of one dataset, or of several one after the other."""


def sources_in(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of a job's document that name a dataset."""
    data = spec.get("data")
    if not isinstance(data, dict):
        return []
    found = cast("dict[str, Any]", data)
    train = found.get("train")
    several = cast("list[Any]", train) if isinstance(train, list) else [train]
    return [
        cast("dict[str, Any]", part)
        for part in (found, *several, found.get("validation"))
        if isinstance(part, dict) and isinstance(cast("Any", part).get("dataset"), str)
    ]


class _Columns(Spec):
    column: Column | None = None
    """The column it reads; left out, the column of the field's own name."""

    @property
    def source_columns(self) -> tuple[str, ...]:
        """The columns that the field names itself, in order; empty for its own name."""
        return () if self.column is None else (self.column,)


class DenseField(_Columns):
    """Floating-point values of one fixed shape per row, as float32."""

    type: Literal["dense"]
    shape: tuple[PositiveInt, ...] | None = Constraint(default=None, max_length=8)
    """Shape of one row; the column is reshaped to it. Left out, the column's own shape."""
    columns: tuple[Column, ...] | None = Constraint(default=None, min_length=1, max_length=10_000)
    """Several columns side by side as one vector, in this order."""
    scale: float | None = None
    """Multiplies every value. Left out: 1/255 for a uint8 column, else 1."""
    fill: Fill | None = None
    """Stands in for a missing value (NaN), in the column's own units: a number; the ``mean`` or the
    ``median`` of the training rows' values that are there, of each feature; ``"NaN"``: it stays and
    reaches the network. Left out: a row with a missing value is a bad row."""
    augment: tuple[Augment, ...] = Constraint(default=(), max_length=32)
    """Of images, rows of shape [channels, height, width]: what is done to them at random, one after
    the other, before they are normalised. To the training rows only, anew in each epoch."""

    @property
    def source_columns(self) -> tuple[str, ...]:
        """The columns that the field names itself, in order; empty for its own name."""
        return self.columns if self.columns is not None else super().source_columns

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        check_at_most_one(self, "column", "columns")
        return self


class IntegerField(_Columns):
    """One integer in [0, dim) per row, as int64: a class or an id."""

    type: Literal["integer"]
    dim: PositiveInt | None = None
    """How many different values there are; a row with a value outside [0, dim) is a bad row. May be
    left unset where it follows: from ``classes``, a column of texts or with class names, or
    windows."""
    classes: tuple[Class, ...] | None = Constraint(
        default=None, min_length=1, max_length=MAX_CLASSES
    )
    """The column's values in the order of their classes: texts, or any integers. The first becomes
    0, the next 1 …; a row with a value that is not listed is a bad row. Left unset, those of a
    column of texts are its different texts, sorted."""

    @model_validator(mode="after")
    def _check_classes(self) -> Self:
        if self.classes is None:
            return self
        if len({type(item) for item in self.classes}) > 1:
            number, other = next(
                (number, item)
                for number, item in enumerate(self.classes)
                if type(item) is not type(self.classes[0])
            )
            detail = f"classes are all texts or all integers: {self.classes[0]!r} and {other!r}"
            raise WrongAt("classes", number, detail=f"{detail} are not alike; write both as texts")
        if (again := repeated(self.classes)) is not None:
            detail = f"classes lists {self.classes[again]!r} twice: remove one"
            raise WrongAt("classes", again, detail=detail)
        if self.dim is not None and self.dim != len(self.classes):
            detail = f"dim is {self.dim}, but classes lists {len(self.classes)}: remove dim"
            raise WrongAt("dim", detail=detail)
        return self


class IntegerSequenceField(_Columns):
    """A list of integers in [0, dim) per row, each with its own length: words, say.

    A layer gets them as int64 of shape [rows, longest], padded behind; ``<field>.lengths`` has the
    lengths, int64 of shape [rows].
    """

    type: Literal["integer_sequence"]
    dim: PositiveInt | None = None
    """How many different values there are; a row with a value outside [0, dim) is a bad row. May be
    left out for ``tokens`` and windows, where it is the size of the vocabulary with padding and
    unknown tokens; given there, the vocabulary is no larger."""
    tokens: Unit | None = None
    """Of a column of texts: each is cut into ``characters``, or into ``words`` at white space, and
    an integer is the place of a token in the vocabulary."""
    vocabulary: Vocabulary | None = None
    """Of ``tokens``: built from the training rows unless it is given. Left out: all tokens."""
    padding_value: int = Constraint(default=0, ge=-(2**31), le=2**31)
    """What stands behind the end of a row. Layers that know the lengths never see it; a loss may be
    told to pass over it (``ignore_index``)."""

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        if self.vocabulary is not None and self.tokens is None:
            detail = "vocabulary needs tokens: set tokens to characters or words"
            raise WrongAt("vocabulary", detail=detail)
        return self


class DenseSequenceField(_Columns):
    """A list of vectors per row, each list with its own length.

    A layer gets them as float32 of shape [rows, longest, dim], padded behind with zeros;
    ``<field>.lengths`` has the lengths, int64 of shape [rows].
    """

    type: Literal["dense_sequence"]
    dim: PositiveInt
    """The width of a vector."""
    scale: float | None = None
    """Multiplies every value. Left out: 1/255 for a uint8 column, else 1."""
    fill: Fill | None = None
    """Stands in for a missing value, as in a dense field."""


class SparseBinaryField(_Columns):
    """A vector of ``dim`` values per row that are 0 or 1, given as the places of the ones.

    For ``EmbeddingBag``, which with ``mode`` ``sum`` is a linear layer over it. A layer gets the
    places as int64 of shape [rows, most], padded with 0, and ``<field>.lengths``: the vector itself
    is never made.
    """

    type: Literal["sparse_binary"]
    dim: PositiveInt
    """The width of the vector; a place outside [0, dim) fails the job by row."""


class SparseFloatField(_Columns):
    """A vector of ``dim`` values per row of which few are not zero, given as places and values.

    The column has lists of pairs ``[place, value]``. For ``EmbeddingBag`` with ``mode`` ``sum``,
    which gets the places as for ``sparse_binary``, and ``<field>.values``: float32 of shape [rows,
    most], padded with zeros.
    """

    type: Literal["sparse_float"]
    dim: PositiveInt
    """The width of the vector; a place outside [0, dim) fails the job by row."""


SequenceField = IntegerSequenceField | DenseSequenceField
SparseField = SparseBinaryField | SparseFloatField
RaggedField = SequenceField | SparseField
Field = Annotated[
    DenseField
    | IntegerField
    | IntegerSequenceField
    | DenseSequenceField
    | SparseBinaryField
    | SparseFloatField,
    Constraint(discriminator="type"),
]


class Sequences(Spec):
    """What happens to long rows of sequence fields."""

    max_length: PositiveInt | None = None
    """The most steps of a row; left out, any number."""
    overflow: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to a longer row. ``truncate``: the steps behind ``max_length`` are cut off.
    ``drop``: the row is left out. ``error``: the job fails and names it. What was cut or left out
    is counted in an event ``dropped``."""

    @model_validator(mode="after")
    def _check_overflow(self) -> Self:
        if self.max_length is None and self.overflow != "truncate":
            detail = f"overflow {self.overflow!r} needs max_length: set the most steps of a row"
            raise WrongAt("overflow", detail=detail)
        return self


class BucketByLength(Spec):
    """Batches of rows of like length, so that little of a batch is padding.

    The rows of an epoch are sorted by length, those of like length in an order drawn for the epoch,
    and cut into batches; the batches come in a drawn order.
    """

    field: Name | None = None
    """The field whose lengths count; left out, the only sequence field."""
    width: int = Constraint(default=1, ge=1, le=1_000_000)
    """Lengths are rounded up to a multiple of this before they are sorted. More of it mixes rows
    better from epoch to epoch, and pads them more."""
    max_tokens: int | None = Constraint(default=None, ge=1, le=1_000_000_000)
    """The most steps of a batch, padding included: its rows times the steps of its longest. Then
    ``batch_size`` is the most rows that it may have. Left out, each has ``batch_size`` rows."""


class Shuffle(Spec):
    """Whether the rows of an epoch come in a new order, and how many of them are in memory."""

    enabled: bool | None = None
    """Left out: yes for training, no for evaluation and inference."""
    buffer_size: int | None = Constraint(default=None, ge=1, le=1_000_000_000)
    """Rows stay in their files, and so many of them, at least a batch, are in memory: a batch is
    drawn from these, and others are read in its place. Left out, all rows are in memory."""
    min_buffer_size: int = Constraint(default=0, ge=0, le=1_000_000_000)
    """The rows that are read before the first batch is drawn; 0: one batch."""


class Data(Spec):
    """The training data, the data that judges it, and how rows become batches."""

    train: Sources
    """A list is several sources as one: columns that are read are alike in all, and rows are
    numbered through them."""
    interleave: Literal["random", "sequential"] | None = None
    """How a pool (``shuffle.buffer_size``) is filled from several sources: ``random``, the default,
    from all of them at once; ``sequential``, from one after the other."""
    validation: Source | None = None
    """Rows for the evaluations; never trained on."""
    fields: dict[Name, Field] = Constraint(min_length=1, max_length=1000)
    """The network's inputs and targets, by name."""
    batch_size: int = Constraint(ge=1, le=1_000_000)
    """Rows of one step."""
    drop_last: bool = False
    """Leave out the last batch of an epoch when it is smaller than the others."""
    shuffle: Shuffle = Shuffle()
    sequence: Sequences = Sequences()
    """How long the rows of sequence fields may be."""
    normalize: dict[Name, Normalize] = Constraint(default={}, max_length=1000)
    """Fields of the types dense and dense_sequence, by name, whose values are normalised."""
    windows: Windows | None = None
    """Rows are windows over the running text of a column. Left out: the dataset's own rows. A
    source's ``fraction`` is then a part of the text as it runs, and nothing is drawn."""
    on_bad_row: Literal["fail", "drop"] = "fail"
    """What becomes of a row that does not fit the fields: an integer out of range, a value that is
    missing or no class, a list of another length than ``shape``. ``fail``: the job fails and names
    row and column. ``drop``: it is left out, and counted in an event ``dropped``."""
    cache: Literal["none", "memory"] = "none"
    """``memory``: rows that stay in their files (``shuffle.buffer_size``) are kept once they were
    read, so that files are read in the first epoch only; the later ones are shuffled as a whole."""
    workers: int = Constraint(default=0, ge=0, le=64)
    """Threads that make batches ahead of training; 0: each is made when it is wanted. The numbers
    are the same."""
    bucket_by_length: BucketByLength | None = None
    """Left out, rows are put together whatever their lengths are."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """Those of the training rows."""
        return self.train if isinstance(self.train, tuple) else (self.train,)

    @property
    def whole(self) -> Source:
        """The training rows as one source, for where several were joined before; else the first."""
        return self.sources[0]

    @model_validator(mode="after")
    def _check_buckets(self) -> Self:
        bucket = self.bucket_by_length
        if bucket is not None and bucket.max_tokens is not None and self.drop_last:
            detail = "drop_last (true) needs batches of one size, and those of"
            detail += f" bucket_by_length.max_tokens ({bucket.max_tokens}) have many: remove one"
            raise WrongAt("drop_last", detail=detail)
        return self
