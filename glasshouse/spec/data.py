"""Training data: datasets, splits, the fields that read their columns, and batching."""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, Discriminator, PositiveInt, Tag, model_validator
from pydantic import Field as Constraint

from glasshouse.spec.augmentation import Augment
from glasshouse.spec.preprocessing import (
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

BUILTINS = {
    "digits": "1,797 handwritten digits of 8 x 8 pixels, as scikit-learn ships them.",
}
"""Datasets that are included with the service, with their summaries."""
SIZE = r"^[1-9][0-9]{0,3}x[1-9][0-9]{0,3}$"
"""A height and a width in pixels, as in ``32x48``."""


def size_of(text: str) -> tuple[int, int]:
    """Read a height and a width.

    Raises:
        ValueError: the text is something else.
    """
    if re.fullmatch(SIZE, text) is None:
        raise ValueError(f"{text[:40]!r} is not a size: give height x width, for example 32x48")
    height, width = text.split("x")
    return int(height), int(width)


def check_fraction(fraction: tuple[float, float] | None) -> None:
    """Check the field ``fraction`` of rows.

    Raises:
        WrongAt: it is not a part of the rows.
    """
    if fraction is not None and not 0 <= fraction[0] < fraction[1] <= 1:
        detail = "fraction must be [from, to] with 0 <= from < to <= 1"
        raise WrongAt("fraction", detail=f"{detail} (got {[*fraction]})")


class Source(Spec):
    """Rows of one dataset."""

    dataset: str = Constraint(min_length=1, max_length=500)
    """The id (``ds_…``) or name of a dataset. When training in-process, without the service:
    ``digits`` or the path of a data file."""
    split: str = Constraint(default="all", min_length=1, max_length=64)
    """A split of the dataset. A file without splits has the single split ``all``. Example:
    ``"train"``."""
    fraction: tuple[float, float] | None = None
    """The part of the split to use, as ``[from, to]`` with 0 <= from < to <= 1. Rows are taken in
    an order drawn from the job's seed, so ``[0, 0.8]`` and ``[0.8, 1]`` of one split share no row
    and together contain all of them. Default: the whole split. Example: ``[0, 0.8]``."""

    @model_validator(mode="after")
    def _check_fraction(self) -> Self:
        check_fraction(self.fraction)
        return self


Sources = Source | Annotated[tuple[Source, ...], Constraint(min_length=1, max_length=100)]
"""Rows of one dataset, or of several, concatenated."""


def _kind_of_validation(value: Any) -> str:
    """Which member of `Validation` a value is: in a map of sources, a value is an object.

    So an unknown field of a mistyped source is reported as such, and not as a source.
    """
    if isinstance(value, Mapping) and not isinstance(value.get("dataset"), str):  # pyright: ignore
        held = cast("Mapping[str, Any]", value).values()
        if any(isinstance(item, Mapping | Source) for item in held):
            return _MAP
    return _ONE


_ONE, _MAP = "one source", "sources by name"
"""The members of `Validation`. These texts are no names of sources."""


def _check_names(named: dict[str, Source]) -> dict[str, Source]:
    """Reject names that are read as something else."""
    for name in named:
        reason = f"{name!r} is a field of a source" if name in Source.model_fields else None
        if name == "loss":
            reason = "'loss' names the series validation/loss"
        if reason is not None:
            raise WrongAt(name, detail=f"{reason}, and cannot name one: choose another name")
    return named


Validation = Annotated[
    Annotated[Source, Tag(_ONE)]
    | Annotated[
        dict[Name, Source],
        Constraint(min_length=1, max_length=20),
        AfterValidator(_check_names),
        Tag(_MAP),
    ],
    Discriminator(_kind_of_validation),
]
"""Rows for evaluations: of one source, or of several with names."""


def sources_in(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of a job spec in JSON that name a dataset."""
    data = spec.get("data")
    if not isinstance(data, dict):
        return []
    found = cast("dict[str, Any]", data)
    held = found.get("validation")
    is_map = _kind_of_validation(held) == _MAP
    validations = cast("dict[str, Any]", held).values() if is_map else (held,)
    return [*_naming([found]), *train_sources_in(spec), *_naming(validations)]


def train_sources_in(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of a job spec in JSON that name a dataset to train on."""
    data = spec.get("data")
    train = cast("dict[str, Any]", data).get("train") if isinstance(data, dict) else None
    return _naming(cast("list[Any]", train) if isinstance(train, list) else [train])


def _naming(parts: Iterable[Any]) -> list[dict[str, Any]]:
    return [
        cast("dict[str, Any]", part)
        for part in parts
        if isinstance(part, dict) and isinstance(cast("Any", part).get("dataset"), str)
    ]


class _Columns(Spec):
    column: Column | None = None
    """The column to read. Default: the column with the name of the field. Example: ``"pixels"``."""

    @property
    def source_columns(self) -> tuple[str, ...]:
        """The columns that the field names, in order; empty if it names none."""
        return () if self.column is None else (self.column,)


class DenseField(_Columns):
    """Numbers of a fixed shape per row, as float32."""

    type: Literal["dense"]
    """Selects this field type."""
    shape: tuple[PositiveInt, ...] | None = Constraint(default=None, max_length=8)
    """Shape of one row; the column is reshaped to it. Default: the shape of the column. Example:
    ``[1, 28, 28]``."""
    columns: tuple[Column, ...] | None = Constraint(default=None, min_length=1, max_length=10_000)
    """Several columns, concatenated into one vector in this order. Not together with ``column``.
    Example: ``["area", "rooms"]``."""
    scale: float | None = None
    """Factor of all values. Default: 1/255 for a uint8 column, else 1. Example: ``0.01``."""
    fill: Fill | None = None
    """Replacement for missing values (NaN), in the units of the column. A number; ``"mean"`` or
    ``"median"`` of the present values of the training rows, per feature; or ``"NaN"``, which passes
    NaN to the network. Default: a row with a missing value is a bad row. Example: ``"mean"``."""
    augment: tuple[Augment, ...] = Constraint(default=(), max_length=32)
    """Random image transforms, applied in order before normalization. They apply to training rows
    only and are drawn anew in each epoch. Rows must have the shape [channels, height, width].
    Example: ``[{"type": "RandomHorizontalFlip"}]``."""

    @property
    def source_columns(self) -> tuple[str, ...]:
        """The columns that the field names, in order; empty if it names none."""
        return self.columns if self.columns is not None else super().source_columns

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        check_at_most_one(self, "column", "columns")
        return self


class IntegerField(_Columns):
    """One integer in [0, dim) per row, as int64, for example a class or an id."""

    type: Literal["integer"]
    """Selects this field type."""
    dim: PositiveInt | None = None
    """Number of possible values; a row with a value outside [0, dim) is a bad row. Optional if it
    follows from ``classes``, from a column of texts or with class names, or from ``windows``.
    Example: ``10``."""
    classes: tuple[Class, ...] | None = Constraint(
        default=None, min_length=1, max_length=MAX_CLASSES
    )
    """The values of the column in the order of their classes: all texts, or all integers. The first
    value becomes 0. A row with any other value is a bad row. Default for a column of texts: its
    unique texts, sorted. Example: ``["cat", "dog"]``."""

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
            detail = f"classes must be all texts or all integers: {self.classes[0]!r} and {other!r}"
            raise WrongAt("classes", number, detail=f"{detail} are not; write both as texts")
        if (again := repeated(self.classes)) is not None:
            detail = f"classes lists {self.classes[again]!r} twice: remove one"
            raise WrongAt("classes", again, detail=detail)
        if self.dim is not None and self.dim != len(self.classes):
            detail = f"dim is {self.dim}, but classes lists {len(self.classes)}: remove dim"
            raise WrongAt("dim", detail=detail)
        return self


class IntegerSequenceField(_Columns):
    """A list of integers in [0, dim) per row, of any length, for example the words of a text.

    Layers receive int64 of shape [rows, longest], padded at the end. ``<field>.lengths`` has the
    lengths, as int64 of shape [rows].
    """

    type: Literal["integer_sequence"]
    """Selects this field type."""
    dim: PositiveInt | None = None
    """Number of possible values; a row with a value outside [0, dim) is a bad row. With ``tokens``
    or ``windows`` it defaults to the size of the vocabulary, including the ids of padding and
    unknown tokens; if you set it, it limits the vocabulary. Example: ``20000``."""
    tokens: Unit | None = None
    """For a column of texts: splits each text into ``characters``, or at white space into
    ``words``. Each token becomes its index in the vocabulary."""
    vocabulary: Vocabulary | None = None
    """The vocabulary for ``tokens``. Default: all tokens of the training rows."""
    padding_value: int = Constraint(default=0, ge=-(2**31), le=2**31)
    """The value after the end of a row. Layers that use lengths ignore it; a loss can ignore it
    with ``ignore_index``. Example: ``-100``."""

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        if self.vocabulary is not None and self.tokens is None:
            detail = "vocabulary needs tokens: set tokens to characters or words"
            raise WrongAt("vocabulary", detail=detail)
        return self


class DenseSequenceField(_Columns):
    """A list of vectors per row, of any length.

    Layers receive float32 of shape [rows, longest, dim], padded at the end with zeros.
    ``<field>.lengths`` has the lengths, as int64 of shape [rows].
    """

    type: Literal["dense_sequence"]
    """Selects this field type."""
    dim: PositiveInt
    """Size of each vector. Example: ``40``."""
    scale: float | None = None
    """Factor of all values. Default: 1/255 for a uint8 column, else 1. Example: ``0.01``."""
    fill: Fill | None = None
    """Replacement for missing values (NaN), in the units of the column. A number; ``"mean"`` or
    ``"median"`` of the present values of the training rows, per feature; or ``"NaN"``, which passes
    NaN to the network. Default: a row with a missing value is a bad row. Example: ``"mean"``."""


class SparseBinaryField(_Columns):
    """A vector of ``dim`` zeros and ones per row, given as a list of the indices of the ones.

    Only ``EmbeddingBag`` reads such a field; with ``mode`` ``sum`` it is a linear layer over the
    vector. It receives the indices as int64 of shape [rows, most], padded with 0, and
    ``<field>.lengths``. The dense vector is never created.
    """

    type: Literal["sparse_binary"]
    """Selects this field type."""
    dim: PositiveInt
    """Size of the vector. A row with an index outside [0, dim) is a bad row. Example:
    ``1000000``."""


class SparseFloatField(_Columns):
    """A sparse vector of ``dim`` numbers per row, given as a list of pairs ``[index, value]``.

    Only ``EmbeddingBag`` with ``mode`` ``sum`` reads such a field. It receives the indices as for
    ``sparse_binary``, and ``<field>.values`` as float32 of shape [rows, most], padded with zeros.
    """

    type: Literal["sparse_float"]
    """Selects this field type."""
    dim: PositiveInt
    """Size of the vector. A row with an index outside [0, dim) is a bad row. Example:
    ``1000000``."""


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
    """Maximum length of sequences, and how to handle longer rows."""

    max_length: PositiveInt | None = None
    """Maximum number of steps of a row. Default: no limit. Example: ``100``."""
    overflow: Literal["truncate", "drop", "error"] = "truncate"
    """How to handle a longer row. ``truncate``: cut off the steps after ``max_length``. ``drop``:
    drop the row. ``error``: fail the job and name the row. An event ``dropped`` has the number of
    cut or dropped rows."""

    @model_validator(mode="after")
    def _check_overflow(self) -> Self:
        if self.max_length is None and self.overflow != "truncate":
            detail = f"overflow {self.overflow!r} needs max_length: set the maximum number of steps"
            raise WrongAt("overflow", detail=detail)
        return self


class BucketByLength(Spec):
    """Batches of rows of similar length, which need little padding.

    The rows of an epoch are sorted by length, rows of equal length in random order, and cut into
    batches. The order of the batches is random.
    """

    field: Name | None = None
    """The field whose lengths are used. Default: the only sequence field. Example: ``"text"``."""
    width: int = Constraint(default=1, ge=1, le=1_000_000)
    """Lengths are rounded up to a multiple of this, in steps, before sorting. A larger width mixes
    rows better between epochs and needs more padding."""
    max_tokens: int | None = Constraint(default=None, ge=1, le=1_000_000_000)
    """Maximum number of steps of a batch, padding included: its rows times the steps of its longest
    row. ``batch_size`` is then the maximum number of rows. Default: each batch has ``batch_size``
    rows. Example: ``2000``."""


class Shuffle(Spec):
    """Whether the rows of an epoch are shuffled, and how many rows are in memory."""

    enabled: bool | None = None
    """Whether to shuffle. Default: true for training, false for evaluation and inference."""
    buffer_size: int | None = Constraint(default=None, ge=1, le=1_000_000_000)
    """Number of rows in the shuffle pool, at least one batch. Other rows stay in their files. Each
    batch is drawn from the pool, and other rows are read in its place. Default: all rows are in
    memory. Example: ``20000``."""
    min_buffer_size: int = Constraint(default=0, ge=0, le=1_000_000_000)
    """Number of rows to read before the first batch is drawn. 0: one batch. Example: ``2000``."""


def _without_default(schema: dict[str, Any]) -> None:
    schema.pop("default")


class Data(Spec):
    """Training data, validation data, and how rows become batches."""

    train: Sources
    """The training rows. In a list, the sources are concatenated: the columns that fields read must
    have the same dtype, shape and class names in all sources. Example: ``{"dataset": "digits",
    "split": "train"}``."""
    interleave: Literal["random", "sequential"] | None = None
    """How the shuffle pool is filled from several sources. Requires ``shuffle.buffer_size``.
    ``random``: from all sources at once. ``sequential``: from one source after the other. Default:
    ``random``."""
    validation: Validation | None = None
    """The rows for evaluations. They are not used for training. One source, whose series are
    ``validation/loss``, ``validation/accuracy`` and so on; or an object of several by name, whose
    series are ``validation/<name>/loss`` and so on. Example: ``{"clean": {"dataset": "digits",
    "split": "test"}}``."""
    fields: dict[Name, Field] = Constraint(min_length=1, max_length=1000)
    """The inputs and targets of the network, by name. Example: ``{"label": {"type": "integer",
    "dim": 10}}``."""
    global_batch_size: int | None = Constraint(default=None, ge=1, le=1_000_000)
    """Number of rows per batch of all processes together, instead of ``batch_size``. It must be a
    multiple of ``parallel.processes``. Example: ``512``."""
    batch_size: int = Constraint(default=0, ge=1, le=1_000_000, json_schema_extra=_without_default)
    """Number of rows per batch and process. A job with one process has batches of this size; with
    several, a step takes ``batch_size`` rows from each. Set exactly one of ``batch_size`` and
    ``global_batch_size``. Example: ``64``."""
    drop_last: bool = False
    """Whether to drop the last batch of an epoch if it is smaller than the others."""
    shuffle: Shuffle = Shuffle()
    """Shuffling, and how many rows are in memory."""
    sequence: Sequences = Sequences()
    """Maximum length of the rows of sequence fields."""
    normalize: dict[Name, Normalize] = Constraint(default={}, max_length=1000)
    """The dense and dense_sequence fields to normalize, by name. Example: ``{"image": {"type":
    "standard"}}``."""
    windows: Windows | None = None
    """Rows are windows over the concatenated texts of a column. ``fraction`` of a source is then a
    contiguous part of the text. Default: the rows of the dataset."""
    on_bad_row: Literal["fail", "drop"] = "fail"
    """How to handle a row that does not fit the fields: an integer out of range, a value that is
    missing or not a class, or a list whose length does not fit ``shape``. ``fail``: fail the job
    and name row and column. ``drop``: drop the row; an event ``dropped`` has the number of rows."""
    cache: Literal["none", "memory"] = "none"
    """``memory``: with ``shuffle.buffer_size``, keep rows in memory once they were read. Files are
    then read in the first epoch only, and later epochs are shuffled as a whole."""
    workers: int = Constraint(default=0, ge=0, le=64)
    """Number of threads that prepare batches ahead of training. 0: each batch is prepared when it
    is needed. The numbers are the same. On CUDA, each process leases a CPU core for each of them,
    unless ``devices.threads`` is set."""
    bucket_by_length: BucketByLength | None = None
    """Groups rows of similar length into batches. Default: rows are batched regardless of their
    lengths."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources of the training rows."""
        return self.train if isinstance(self.train, tuple) else (self.train,)

    @property
    def whole(self) -> Source:
        """The first source; the only one after several were joined."""
        return self.sources[0]

    @property
    def validations(self) -> dict[str, Source]:
        """The sources of evaluations, in order, by the prefix of their series.

        The prefix is also the path of the source in ``data``: ``validation`` for one source, else
        ``validation/<name>``. Empty: there are no evaluations.
        """
        held = self.validation
        if held is None:
            return {}
        if isinstance(held, Source):
            return {"validation": held}
        return {f"validation/{name}": source for name, source in held.items()}

    @model_validator(mode="after")
    def _check_batch_size(self) -> Self:
        if self.batch_size:
            return self
        if self.global_batch_size is not None:
            object.__setattr__(self, "batch_size", self.global_batch_size)  # frozen from here on
        else:
            detail = "batch_size is missing: set it to the number of rows per batch and process,"
            raise WrongAt("batch_size", detail=f"{detail} or set global_batch_size")
        return self

    @model_validator(mode="after")
    def _check_buckets(self) -> Self:
        bucket = self.bucket_by_length
        if bucket is not None and bucket.max_tokens is not None and self.drop_last:
            detail = "drop_last (true) needs batches of equal size, and their size varies with"
            detail += f" bucket_by_length.max_tokens ({bucket.max_tokens}): remove one"
            raise WrongAt("drop_last", detail=detail)
        return self
