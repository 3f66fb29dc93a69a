"""Memory of the rows of a job, from the dataset's description alone: of all rows, or of a pool."""

import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from engine.core.problems import Findings
from engine.data.batches.shuffle_pool import Pool
from engine.data.columns.fields import BadField, column_view, field_shape, num_steps
from engine.data.sources.streamed import LIST_BYTES
from engine.data.sources.text_windows import num_windows, part_of
from engine.inference.rows import READ_AHEAD
from engine.network.shapes import FieldShape
from glasshouse.spec import (
    Data,
    Field,
    InferData,
    IntegerSequenceField,
    Source,
    Spec,
    TrainJob,
)

_AHEAD = 2
"""Most batches' worth of rows in one read: those that enter a growing pool."""
_DEVIATIONS = 6
_STREAMED = frozenset(
    (
        *("train", "interleave", "validation", "fields", "batch_size", "drop_last"),
        *("shuffle", "sequence", "cache", "workers", "normalize", "on_bad_row", "windows"),
        "bucket_by_length",
    )
)
"""Settings that work with rows in files; other settings of ``data`` need rows in memory."""
_STREAMED_FIELDS = frozenset(
    (
        *("type", "column", "columns", "shape", "scale", "dim", "padding_value", "fill"),
        "augment",
        *("classes", "tokens", "vocabulary"),
    )
)
_TOKEN_BYTES = 250
"""Bytes of a vocabulary's token: its text and its entries in tables."""


class _Column(NamedTuple):
    """The memory of a field's rows."""

    row_bytes: int
    """Bytes of each row, if all have the same size."""
    step_bytes: int
    """Bytes of each step of a variable-length row, which also has a start and a length."""
    column: dict[str, Any]
    longest: int
    input_bytes: int
    """Bytes of each row, or of each step, as the network takes it."""


def rows_of(source: Source | InferData, meta: Mapping[str, Any]) -> int:
    """Return the number of rows that a source takes of its split."""
    fraction = getattr(source, "fraction", None)
    if "windows" in meta:
        first, last = part_of(meta["tokens"][source.split], fraction)
        return num_windows(meta["windows"], last - first)
    if "taken" in meta:  # several sources, each with its own fraction
        return int(meta["taken"])
    total = int(meta["splits"][source.split])
    return total if fraction is None else int(fraction[1] * total) - int(fraction[0] * total)


def training_bytes(spec: TrainJob, datasets: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the bytes of a training job's rows, including those of evaluations."""
    data = spec.global_data
    sources = [data.whole, *data.validations.values()]
    metas = [(source, datasets[source.dataset]) for source in sources]
    if data.shuffle.buffer_size is None:
        normal = data.normalize
        return sum(source_bytes(data.fields, source, meta, normal) for source, meta in metas)
    return sum(
        _streamed_bytes(data, source, meta, trains=source is data.whole) for source, meta in metas
    )


def inference_bytes(
    fields: Mapping[str, Field], asked: InferData, trained: Data, meta: Mapping[str, Any]
) -> int:
    """Return the most bytes of rows and of batches that an inference has in memory.

    Each of the `READ_AHEAD` threads reads the rows of a batch, copies them and converts them. Of
    converted batches there are one in use, one that is ready for each thread, and the next one.

    ``trained``: the data of the job that trained the network.
    """
    mine = {"fields": dict(fields), "batch_size": asked.batch_size, "on_bad_row": asked.on_bad_row}
    data = trained.model_copy(update=mine)
    fraction = getattr(asked, "fraction", None)  # of an evaluation
    source = Source(dataset=asked.dataset, split=asked.split, fraction=fraction)
    size = min(asked.batch_size, rows_of(source, meta))
    most = data.sequence.max_length or sys.maxsize
    needed = _places_bytes(data, source, meta)
    for column in _columns(data.fields, meta, source.split, data.normalize):
        count = size * (min(column.longest, most) if column.step_bytes else 1)
        stored = count * (column.row_bytes or column.step_bytes)
        needed += 2 * READ_AHEAD * stored + (2 + READ_AHEAD) * count * column.input_bytes
    return needed


def source_bytes(
    fields: Mapping[str, Field],
    source: Source | InferData,
    meta: Mapping[str, Any],
    normalize: Mapping[str, Any],
) -> int:
    """Return the bytes of all rows of a source in memory."""
    num_rows, size = rows_of(source, meta), 0
    if "windows" in meta:  # one text per field, and the start of each window
        text = int(meta["tokens"][source.split]) * 4
        items = _columns(fields, meta, source.split)
        return sum((text + 16 * num_rows) if item.step_bytes else 8 * num_rows for item in items)
    share = num_rows / meta["splits"][source.split]
    for item in _columns(fields, meta, source.split, normalize):
        size += item.row_bytes * num_rows
        if item.step_bytes:
            steps = num_steps(item.column, source.split, meta["splits"][source.split])
            size += int(steps * share) * item.step_bytes + num_rows * 16
    return size


def _columns(
    fields: Mapping[str, Field],
    meta: Mapping[str, Any],
    split: str,
    normalize: Mapping[str, Any] | None = None,
) -> list[_Column]:
    found: list[_Column] = []
    for name, field in fields.items():
        try:
            shape = field_shape(name, field, dict(meta), split)
        except BadField:  # reported where fields are checked
            continue
        column = column_view(name, field, meta)
        dtype = column["dtype"]
        if shape.is_sequence:
            dtype = "float32" if name in (normalize or {}) else dtype
            stored, longest = _step_bytes(shape, dtype), shape.shape[0]
            step = torch.Size(shape.shape[1:]).numel() * shape.dtype.itemsize
            step += 4 if shape.has_values else 0
            found.append(_Column(0, stored, column, longest, step))
            continue
        width = 1 if dtype == "uint8" and shape.dim is None else shape.dtype.itemsize
        count = torch.Size(shape.shape).numel()
        row = count * shape.dtype.itemsize
        found.append(_Column(width * count, 0, column, 0, row))
    return found


def _step_bytes(shape: FieldShape, dtype: str) -> int:
    if shape.has_values:
        return 8
    if shape.dim is not None:
        return 4 if shape.dim <= 2**31 else 8
    return torch.Size(shape.shape[1:]).numel() * (1 if dtype == "uint8" else 4)


# --- rows that stay in their files -----------------------------------------------------------


def check_streaming(data: Data, meta: Mapping[str, Any], findings: Findings) -> None:
    """Check the size of the pool and the settings that do not work with one."""
    shuffle, size = data.shuffle, data.batch_size
    least, most = shuffle.min_buffer_size, shuffle.buffer_size
    pointer = "/data/shuffle/min_buffer_size"
    if most is None:
        if data.cache == "memory":
            detail = "all rows are in memory: leave it out, or set shuffle.buffer_size"
            findings.problem("/data/cache", detail, "no_buffer")
        if least:
            detail = "all rows are read before the first batch: set buffer_size, or leave it out"
            findings.problem(pointer, detail, "no_buffer")
        return
    if most < size:
        detail = f"a batch takes {size} rows, and {most} would be there: set at least {size}"
        findings.problem("/data/shuffle/buffer_size", detail, "too_small")
    if least and shuffle.enabled is False:
        detail = "rows in their stored order wait for no others: leave it out, or shuffle"
        findings.problem(pointer, detail, "no_shuffle")
    elif 0 < least < size:
        detail = f"a batch takes {size} rows: set at least as many, or 0 to begin with one batch"
        findings.problem(pointer, detail, "too_small")
    elif least > most:
        detail = f"there are never more than buffer_size, {most}: set at most that"
        findings.problem(pointer, detail, "too_large")
    _check_known(data, _STREAMED, "/data", findings)
    for name, field in data.fields.items():
        _check_known(field, _STREAMED_FIELDS, f"/data/fields/{name}", findings)
    _check_vocabularies(data, meta, findings)
    _check_buckets(data, findings)


def _check_buckets(data: Data, findings: Findings) -> None:
    """Check the settings that do not work with a pool whose batches have rows of similar length."""
    shuffle, size, wanted = data.shuffle, data.batch_size, data.bucket_by_length
    if wanted is None:
        return
    pointer = "/data/bucket_by_length"
    if data.windows is not None:
        findings.problem(pointer, "windows all have one length: leave it out", "no_sequence")
    if shuffle.enabled is False:
        detail = "a pool that is not shuffled gives rows as they are stored: leave it out"
        findings.problem(pointer, detail, "no_shuffle")
    if wanted.max_tokens is not None:
        detail = "the number of batches would depend on which rows meet in a pool: remove it"
        findings.problem(f"{pointer}/max_tokens", f"{detail} or buffer_size", "streamed")
    if shuffle.min_buffer_size:
        detail = "rows are sorted by length when the pool is full: leave it out"
        findings.problem("/data/shuffle/min_buffer_size", detail, "streamed")
    if size <= (shuffle.buffer_size or 0) < 2 * size:
        detail = f"rows that are sorted and those of the next batch need {2 * size} at least"
        findings.problem("/data/shuffle/buffer_size", detail, "too_small")


def _check_vocabularies(data: Data, meta: Mapping[str, Any], findings: Findings) -> None:
    split = data.whole.split
    counts = {
        f"fields/{name}": _tokens_to_count(name, field, split, meta)
        for name, field in data.fields.items()
    }
    counts["windows"] = _window_tokens(data, split, meta)
    for place, count in counts.items():
        if count is None:
            detail = "there are more different ones than a dataset counts, and counting them takes"
            detail += " memory without bound: give the vocabulary, or leave out shuffle.buffer_size"
            findings.problem(f"/data/{place}/vocabulary", detail, "streamed")


def _tokens_to_count(name: str, field: Field, split: str, meta: Mapping[str, Any]) -> int | None:
    """Return the unique tokens for a field's vocabulary; None: more than are known."""
    if not isinstance(field, IntegerSequenceField) or field.tokens is None:
        return 0
    if field.vocabulary is not None and field.vocabulary.given is not None:
        return 0
    counts = column_view(name, field, meta)["tokens"][field.tokens][split]["at_least"]
    return None if counts is None else int(counts[0]) if counts else 0


def _window_tokens(data: Data, split: str, meta: Mapping[str, Any]) -> int | None:
    """Return the unique tokens of a text with windows; None: more than are known."""
    if data.windows is None or data.windows.vocabulary.given is not None:
        return 0
    found = meta["distinct"][split]
    return None if found is None else int(found) + 1


def _check_known(given: Spec, known: frozenset[str], pointer: str, findings: Findings) -> None:
    """Add findings for settings that rows in files do not support."""
    for name in sorted(type(given).model_fields.keys() - known):
        if getattr(given, name) != type(given).model_fields[name].get_default():
            detail = "it needs all rows in memory: leave it out, or leave out shuffle.buffer_size"
            findings.problem(f"{pointer}/{name}", detail, "streamed")


def _streamed_bytes(data: Data, source: Source, meta: Mapping[str, Any], *, trains: bool) -> int:
    """Return the most bytes of a source whose rows are read as they are needed."""
    num_rows = rows_of(source, meta)
    shuffles = trains and data.shuffle.enabled is not False
    size = min(data.batch_size, num_rows)
    pool = Pool(num_rows, size, data.shuffle.buffer_size or size)
    ahead = (2 + data.workers) * (_AHEAD if shuffles else 1) * size
    needed = _places_bytes(data, source, meta)
    if trains:
        counts = [_tokens_to_count(*item, source.split, meta) for item in data.fields.items()]
        counts.append(_window_tokens(data, source.split, meta))
        needed += _TOKEN_BYTES * sum(count or 0 for count in counts)
    needed += pool.index_bytes if shuffles else 0
    if trains and data.bucket_by_length is not None:  # lengths, and a block that is sorted
        needed += 32 * int(meta["splits"][source.split]) + 48 * pool.capacity
    keeps = data.cache == "memory"
    capacity = num_rows if keeps else pool.capacity if shuffles else 0
    needed += 17 * num_rows if keeps else 0  # the valid rows, and the order of an epoch
    most = data.sequence.max_length or sys.maxsize
    for column in _columns(data.fields, meta, source.split, data.normalize):
        item = column._replace(longest=min(column.longest, most))
        if item.row_bytes:
            needed += item.row_bytes * (ahead + size + capacity)
            continue
        needed += (ahead + size) * item.longest * item.step_bytes
        if capacity:
            split_rows = int(meta["splits"][source.split])
            steps = _most_steps(item, (source.split, split_rows), pool, capacity)
            needed += steps * item.step_bytes + capacity * LIST_BYTES
    return needed


def _places_bytes(data: Data, source: Source, meta: Mapping[str, Any]) -> int:
    """Return the bytes of the row selection of a source that does not take all rows."""
    if data.windows is not None:  # the starts of the text's rows, and their lengths before
        return 24 * int(meta["lines"][source.split])
    needed, num_rows = 0, int(meta["splits"][source.split])
    if source.fraction is not None:  # all in a random order, a part of them, and that part sorted
        taken = int((source.fraction[1] - source.fraction[0]) * num_rows)
        needed = 8 * num_rows + 16 * taken
    if data.sequence.max_length is not None:  # row starts, lengths, numbers
        needed += 40 * num_rows
        needed += (
            24 * num_rows * any(getattr(item, "tokens", None) for item in data.fields.values())
        )
    if data.on_bad_row == "drop":  # the numbers of the rows that fit
        needed += 16 * num_rows
    return needed


def _most_steps(item: _Column, split: tuple[str, int], pool: Pool, capacity: int) -> int:
    """Return the steps of randomly drawn rows, six standard deviations above the mean.

    Rows come in runs that may be alike. The deviation of lengths is not known, so it is the largest
    one possible with this mean and these ends.
    """
    name, num_rows = split
    longest = item.longest
    if item.column["shape"][0] is not None:
        return capacity * longest
    ends = item.column["lengths"][name]
    total = int(ends["total"])
    mean = min(total / num_rows, longest)
    spread = math.sqrt(capacity * pool.run * (longest - mean) * max(0, mean - int(ends["min"])))
    return min(total, capacity * longest, math.ceil(capacity * mean + _DEVIATIONS * spread))
