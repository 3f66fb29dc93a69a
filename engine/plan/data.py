"""The data of a plan: the shapes of fields, the number of rows, and their memory.

From the datasets' descriptions alone. Knows the words of a job; reads no row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.core.problems import Findings, one
from engine.data.columns.fields import BadField, field_columns, field_shape
from engine.data.sources.joined import Disagree, joined_meta, name_of
from engine.data.sources.text_windows import windowed
from engine.datasets.column_stats import MAX_COUNTED_BYTES, MAX_DISTINCT
from engine.network.shapes import FieldShape
from engine.plan.data_memory import rows_of
from glasshouse import jsonio
from glasshouse.spec import (
    Data,
    DenseField,
    DenseSequenceField,
    Field,
    InferData,
    IntegerField,
    IntegerSequenceField,
    Source,
    Trained,
    Windows,
)
from glasshouse.spec.preprocessing import MAX_CLASS_LENGTH, MAX_CLASSES

Meta = Mapping[str, Any]
Metas = Mapping[str, Meta]
Rows = Source | InferData
FIELDS = "/data/fields"
_LISTED = 20


def meta_of(source: Rows, datasets: Metas, pointer: str, findings: Findings) -> Meta:
    """Return the description of a source's dataset; note what prevents reading it."""
    meta = datasets.get(source.dataset)
    if meta is None:
        detail = f"there is no dataset {source.dataset!r}"
        raise one(f"{pointer}/dataset", detail, "unknown_dataset")
    if source.split not in meta["splits"]:
        listed = ", ".join(meta["splits"])
        detail = f"dataset {source.dataset!r} has no split {source.split!r}; it has: {listed}"
        findings.problem(f"{pointer}/split", detail, "unknown_split")
    elif not rows_of(source, meta):
        what = "the text is shorter than a window" if "windows" in meta else "no rows are left"
        findings.problem(pointer, f"{what} to read", "no_rows")
    return meta


JOINED = "several sources"
"""Stands for a dataset where several are planned as one."""


def check_interleave(data: Data, findings: Findings) -> None:
    """Check that several sources are interleaved by a pool that shuffles."""
    if data.interleave is None:
        return
    pointer = "/data/interleave"
    if len(data.sources) == 1:
        findings.problem(pointer, "there is one source: leave it out, or name several", "one")
    elif data.shuffle.buffer_size is None:
        detail = "rows in memory are shuffled as a whole: leave it out, or set shuffle.buffer_size"
        findings.problem(pointer, detail, "no_buffer")
    elif data.shuffle.enabled is False:
        detail = "rows come as they are stored, one source after the other: leave it out"
        findings.problem(pointer, detail, "no_shuffle")


def joined(data: Data, datasets: Metas) -> tuple[Data, Metas]:
    """Return the data with one source that stands for all of ``train``, and its description.

    Raises:
        SpecProblems: a source cannot be read, or has other columns than the first.
    """
    findings = Findings()
    metas = [
        meta_of(source, datasets, f"/data/train/{number}", findings)
        for number, source in enumerate(data.sources)
    ]
    findings.stop()
    if data.windows is not None:
        detail = "windows are over one running text: name one source"
        raise one("/data/windows", detail, "several_sources")
    wanted = {column for name, item in data.fields.items() for column in field_columns(name, item)}
    try:
        meta = joined_meta([*zip(data.sources, metas, strict=True)], wanted)
    except Disagree as cause:
        raise one(f"/data/train/{cause.number}", str(cause), "columns") from cause
    name = name_of(data.sources)
    taken = sum(rows_of(item, meta) for item, meta in zip(data.sources, metas, strict=True))
    is_whole = all(item.fraction is None for item in data.sources)
    source = Source(
        dataset=JOINED,
        split=name,
        fraction=None if is_whole else (0.0, taken / meta["splits"][name]),
    )
    update = {"train": source}
    whole = {**meta, "taken": taken}
    return data.model_copy(update=update), {**datasets, JOINED: whole}


def seen_as_windows(
    datasets: Metas, windows: Windows | None, train: Rows | None, dim: int | None = None
) -> Metas:
    """Return the datasets as the job sees them; the vocabulary is built from ``train``.

    Raises:
        SpecProblems: one has no such text.
    """
    if windows is None:
        return datasets
    try:
        if train is not None and train.dataset in datasets:
            whole = windowed(datasets[train.dataset], windows, train.split, dim)
            dim = whole["columns"][0]["dim"]
        return {
            name: {**windowed(meta, windows, None, dim), "windows": windows}
            for name, meta in datasets.items()
        }
    except BadField as cause:
        raise one(f"/data/windows/{cause.key}", str(cause), "field") from cause


def field_shapes(
    fields: Mapping[str, Field],
    meta: Meta,
    findings: Findings,
    source: Rows | None = None,
) -> dict[str, FieldShape]:
    """Return each field's shape; note those that do not fit their columns."""
    split = None if source is None else source.split
    shapes: dict[str, FieldShape] = {}
    for name, field in fields.items():
        try:
            shapes[name] = field_shape(name, field, dict(meta), split)
        except BadField as cause:
            pointer = f"{FIELDS}/{name}"
            pointer = f"{pointer}/{cause.key}" if cause.key else pointer
            findings.problem(pointer, str(cause), "field")
    return shapes


def with_sizes(fields: Mapping[str, Field], shapes: Mapping[str, FieldShape]) -> dict[str, Field]:
    """Return the fields with what depends on the data: row shapes, numbers of values."""
    made: dict[str, Field] = {}
    for name, field in fields.items():
        update: dict[str, Any] = {}
        if isinstance(field, DenseField) and name in shapes:
            update = {"shape": shapes[name].shape}
        elif isinstance(field, IntegerField | IntegerSequenceField) and name in shapes:
            update = {"dim": shapes[name].dim}
        made[name] = field.model_copy(update=update)
    return made


def as_begun(fields: Mapping[str, Field], trained_by: Trained | None) -> dict[str, Field]:
    """Return the fields with the vocabulary sizes of the checkpoint."""
    made = dict(fields)
    for name, field in fields.items():
        before = None if trained_by is None else trained_by.data.fields.get(name)
        if not isinstance(field, IntegerSequenceField) or field.dim is not None:
            continue
        if isinstance(before, IntegerSequenceField) and before.tokens == field.tokens is not None:
            made[name] = field.model_copy(update={"dim": before.dim})
    return made


def encoded(
    fields: Mapping[str, Field],
    metas: Sequence[Meta],
    trained_by: Trained | None,
    findings: Findings,
) -> dict[str, Field]:
    """Return the fields with the classes of the columns that have texts, or named numbers.

    Args:
        fields: of the job.
        metas: of the training data and of all validation data.
        trained_by: the job whose weights this one begins with; its classes are kept.
        findings: receives the problems.
    """
    before = {} if trained_by is None else trained_by.data.fields
    made = dict(fields)
    for name, field in fields.items():
        if not isinstance(field, IntegerField) or field.classes is not None:
            continue
        (column,) = field_columns(name, field)
        found: list[Mapping[str, Any]] = [
            next((item for item in meta["columns"] if item["name"] == column), {}) for meta in metas
        ]
        classes = _classes(name, field, found, before.get(name), findings)
        if classes is not None:
            made[name] = field.model_copy(update={"classes": classes, "dim": len(classes)})
    return made


def _classes(
    name: str,
    field: IntegerField,
    columns: Sequence[Mapping[str, Any]],
    before: Field | None,
    findings: Findings,
) -> tuple[str, ...] | None:
    """Return a field's classes; None: unnamed integers, or its column cannot be read."""
    column = columns[0]
    learned = before.classes if isinstance(before, IntegerField) else None
    if "values" in column:
        return _text_classes(name, field, column, learned, findings)
    names: list[str] | None = column.get("classes")
    is_without = isinstance(before, IntegerField) and learned is None
    if names is None or is_without or field.dim not in {None, len(names)}:
        return None
    fit = len(set(names)) == len(names) <= MAX_CLASSES and max(map(len, names)) <= MAX_CLASS_LENGTH
    return tuple(names) if fit and all(one.get("classes") == names for one in columns) else None


def _text_classes(
    name: str,
    field: IntegerField,
    column: Mapping[str, Any],
    learned: Sequence[Any] | None,
    findings: Findings,
) -> tuple[str, ...] | None:
    """Return the texts of a column in order, those of the loaded weights first."""
    pointer, of = f"{FIELDS}/{name}", f"column {column['name']!r}"
    values: list[str] | None = column["values"]
    if values is None:
        detail = f"{of} has more than {MAX_DISTINCT:,} different texts, or one of more than"
        detail += f" {MAX_COUNTED_BYTES} bytes: list the classes, or read the texts as tokens"
        findings.problem(f"{pointer}/classes", f"{detail} (integer_sequence)", "too_many_classes")
        return None
    if not values:
        findings.problem(pointer, f"{of} has empty texts only", "no_classes")
        return None
    if learned is not None and {*values} <= {*learned}:
        values = list(learned)
    listed = ", ".join(map(jsonio.dumps, values[:_LISTED]))
    listed += f" and {len(values) - _LISTED} more" if len(values) > _LISTED else ""
    if field.dim is not None and field.dim != len(values):
        detail = f"dim is {field.dim}, and {of} has {len(values)} different texts: {listed};"
        findings.problem(f"{pointer}/dim", f"{detail} leave dim out, or list the classes", "dim")
        return None
    _warn_of_texts(pointer, column, values, findings)
    return tuple(values)


def _warn_of_texts(
    pointer: str, column: Mapping[str, Any], values: Sequence[str], findings: Findings
) -> None:
    """Warn of numbers mixed with texts, which may be a mistake in the data."""
    first = column.get("no_number")
    if first is not None and any(map(_is_number, values)):
        detail = f"column {column['name']!r} has numbers and texts, and each different one is a"
        detail += f" class; the first text is {jsonio.dumps(first['value'])} in line"
        detail += f" {first['line']}: if that is a mistake, correct it and upload the file again"
        findings.warn(pointer, detail, "mixed_classes")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def window_dim(trained_by: Trained | None) -> int | None:
    """Return the vocabulary size of a checkpoint's windows, if it has one."""
    if trained_by is None or trained_by.data.windows is None:
        return None
    dims = [getattr(field, "dim", None) for field in trained_by.data.fields.values()]
    return max((dim for dim in dims if dim is not None), default=None)


def limited(
    data: Data, shapes: Mapping[str, FieldShape], findings: Findings
) -> dict[str, FieldShape]:
    """Limit the shapes to the job's longest row; note what that drops."""
    limit = data.sequence
    made = dict(shapes)
    pointer = "/data/sequence/max_length"
    if limit.max_length is not None and data.windows is not None:
        findings.problem(pointer, "windows have their own length: leave it out", "no_sequence")
    elif limit.max_length is not None and not any(
        shape.is_sequence and not shape.is_sparse for shape in shapes.values()
    ):
        detail = "no field is a sequence, whose rows it could limit: leave it out"
        findings.problem(pointer, detail, "no_sequence")
    for name, shape in shapes.items():
        if not shape.is_sequence or shape.is_sparse:
            continue
        if limit.max_length is None or shape.shape[0] <= limit.max_length:
            continue
        made[name] = replace(shape, shape=(limit.max_length, *shape.shape[1:]))
        detail = f"the longest row of field {name!r} has {shape.shape[0]} steps"
        if limit.overflow == "error" and data.whole.fraction is None:
            detail += "; raise max_length, or set overflow to truncate or drop"
            findings.problem(pointer, detail, "too_long")
        elif limit.overflow == "drop":
            detail += ": longer ones are dropped, and there will be fewer steps than planned"
            findings.warn("/data/sequence/overflow", detail, "dropped_rows")
    findings.stop()
    return made


def check_validation(data: Data, datasets: Metas, findings: Findings) -> None:
    """Check that validation rows match training rows; ``data`` has its fields' sizes."""
    train = field_shapes(data.fields, datasets[data.whole.dataset], Findings())
    for place, source in data.validations.items():
        meta = meta_of(source, datasets, f"/data/{place}", findings)
        if source.dataset == data.whole.dataset:
            continue
        own = Findings()
        shapes = field_shapes(data.fields, meta, own)
        for item in own.problems:
            where = f"in the rows of {place}, " if "/" in place else ""
            findings.problem(item.pointer, f"{where}{item.detail}", item.code)
        for name, shape in shapes.items():
            if name in train and _of_any_length(shape) != _of_any_length(train[name]):
                detail = f"field {name!r} has rows of shape {list(shape.shape)} for {place} and"
                detail += f" {list(train[name].shape)} for training"
                findings.problem(f"{FIELDS}/{name}", detail, "shape")


def _of_any_length(shape: FieldShape) -> FieldShape:
    return replace(shape, shape=(0, *shape.shape[1:])) if shape.is_sequence else shape


# --- preparing -------------------------------------------------------------------------------


def check_preparing(data: Data, meta: Meta, findings: Findings) -> None:
    """Check that each preparation of rows is for an existing field that needs it."""
    for name in data.normalize:
        field = data.fields.get(name)
        if field is None:
            detail = f"there is no field {name!r}; there are: {', '.join(data.fields)}"
            findings.problem(f"/data/normalize/{name}", detail, "unknown_field")
        elif not isinstance(field, DenseField | DenseSequenceField):
            detail = f"field {name!r} is {field.type}: only dense and dense_sequence are normalised"
            findings.problem(f"/data/normalize/{name}", detail, "field")
    if data.windows is not None:
        if data.on_bad_row != "fail":
            detail = "windows over a text have no bad rows: leave it out"
            findings.problem("/data/on_bad_row", detail, "no_rows")
        return
    for name, field in data.fields.items():
        _check_gaps(name, field, data, meta, findings)


def _check_gaps(name: str, field: Field, data: Data, meta: Meta, findings: Findings) -> None:
    """Check missing values and lists of other lengths that the description shows."""
    if not isinstance(field, DenseField | IntegerField):
        return
    names = field.source_columns or (name,)
    for column in (item for item in meta["columns"] if item["name"] in names):
        if None in column["shape"]:
            detail = f"the rows of column {column['name']!r} differ in length: set data.on_bad_row"
            if data.on_bad_row == "fail":
                findings.problem(f"{FIELDS}/{name}/shape", f"{detail} to drop", "bad_rows")
            continue
        missing = column.get("missing", 0) if column["dtype"].startswith("float") else 0
        if not missing or getattr(field, "fill", None) is not None:
            continue
        detail = f"column {column['name']!r} has {missing:,} missing values"
        is_dense = isinstance(field, DenseField)
        pointer = f"{FIELDS}/{name}/fill" if is_dense else "/data/on_bad_row"
        if data.on_bad_row == "drop":
            detail += ": their rows are dropped, and there will be fewer steps than planned"
            findings.warn("/data/on_bad_row", detail, "dropped_rows")
        elif len(meta["splits"]) == 1 and data.whole.fraction is None:
            detail += f": set {'fill, or ' if is_dense else ''}data.on_bad_row to drop"
            findings.problem(pointer, detail, "bad_rows")
        else:
            findings.warn(pointer, f"{detail}: one in a row that is read fails the job", "bad_rows")
