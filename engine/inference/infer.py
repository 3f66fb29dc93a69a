"""Inference: run a trained network over rows, and store the outputs of any of its layers.

Rows are read from files a batch at a time, and their outputs are stored in parts while the next are
computed, so that memory does not grow with the data, and another attempt of the job computes only
what is missing. Several processes divide the parts among them.

Shape suffixes: B = rows of a batch, S = the steps of all rows of a batch together.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.checkpoint import load_model
from engine.core.precision import dtype_name
from engine.core.spool import now
from engine.core.tensor_names import root
from engine.data.batches.batch import Batch
from engine.data.batches.rows import Rows
from engine.distributed.group import ALONE, Group
from engine.inference import files, parts
from engine.inference.blocks import Block, Blocks, Column, Shapes
from engine.inference.classes import Classes, classified, fields_of, read_fields, told
from engine.inference.files import Whole
from engine.inference.parts import Part, PartWriter, Plan
from engine.inference.reporting import (
    BAD_ROWS,
    Ended,
    Look,
    Progress,
    report_bad_rows,
    report_dropped_rows,
    report_file,
)
from engine.inference.rows import Inputs, fields_needed, outputs_of, rows_of, steps_in
from engine.network.layers import work_out_of_place
from engine.network.network import Network
from engine.training.control import RunControl
from engine.training.report import Outputs
from glasshouse import jsonio
from glasshouse.errors import SpecFailed
from glasshouse.failpoints import failpoint
from glasshouse.spec import InferJob, Trained

PREDICTIONS = "predictions.csv"
RESULT_BYTES = 64 * 1024
"""Results up to this size are also given as JSON …"""
RESULT_JSON_BYTES = 256_000
"""… unless the JSON is longer than this."""


def run(  # noqa: PLR0913 (a job, what it reads, and who hears of it)
    job: InferJob,
    trained_by: Trained | None,
    inputs: Inputs,
    *,
    control: RunControl,
    out: Outputs,
    group: Group = ALONE,
    stored: Mapping[str, Path] = {},
) -> str:
    """Run an inference job; return ``succeeded`` or ``cancelled``.

    ``stored``: the parts that earlier attempts have stored, by file name.
    """
    if trained_by is None:
        raise SpecFailed("The inference job was not told which job trained its checkpoint.")
    artifacts = out.directory / "artifacts"
    artifacts.mkdir(parents=True, exist_ok=True)
    with (artifacts / BAD_ROWS).open("w", encoding="utf-8") as bad_rows:
        try:
            rows = rows_of(job, trained_by, inputs, look=Look(control), bad_rows=bad_rows)
        except Ended:
            return "cancelled"
    try:
        report_dropped_rows(rows, out)
        predictor = Predictor(job, trained_by, inputs, rows)
        done = _Parts(predictor, rows, control=control, out=out, group=group, stored=stored).run()
    finally:
        rows.close()
    if done is None:
        return "cancelled"
    if group.is_first:
        _write(job, predictor, done, out)
    return "succeeded"


class Predictor:
    """A trained network that returns fields of its layers for batches."""

    def __init__(self, job: InferJob, trained_by: Trained, inputs: Inputs, rows: Rows) -> None:
        """Load the weights.

        Raises:
            CheckpointDamaged, CheckpointMismatch: they are not those of the network.
        """
        self.job = job
        self.wanted = outputs_of(job, trained_by.network)
        self.batch_size = job.data.batch_size if job.data is not None else 256
        self._network = Network(trained_by.network, self.wanted, prune=True)
        load_model(inputs.checkpoint, self._network, partial=True)
        self._network.to(inputs.device).eval()
        work_out_of_place(self._network)
        fields = fields_needed(job, trained_by)
        self._steps = steps_in(trained_by, fields, self.wanted, rows, self.batch_size)
        self._types = {layer.name: layer.type for layer in trained_by.network.layers}
        known = classified(trained_by)
        self.known = {name: known[name] for name in self.wanted if name in known}
        """The classes of the outputs that score classes."""

    def __call__(self, batch: Batch) -> Block:
        """Return the outputs of a batch."""
        values = self._network(batch.tensors)
        asked = {name: fields_of(self.job, name, self.known) for name in self.wanted}
        columns = columns_of(values, batch.lengths, asked, self._steps, self._types, self.job.top_k)
        return Block(batch.row_numbers.cpu(), columns)


def columns_of(
    values: Mapping[str, Tensor],
    lengths: Mapping[str, Tensor],
    asked: Mapping[str, tuple[str, ...]],
    steps: Mapping[str, str],
    types: Mapping[str, str],
    top_k: int | None,
) -> dict[str, Column]:
    """Return fields of outputs of the network in host memory, by ``<layer>/<field>``.

    Args:
        values: the outputs, by layer.
        lengths: the steps of each row, by sequence field.
        asked: the fields to return of each output.
        steps: the sequence field of each output that has a value per step.
        types: the types of the layers.
        top_k: the number of entries of the field ``top_k``; None: the default.
    """
    columns: dict[str, Column] = {}
    for name, fields in asked.items():
        x, lengths_B = values[name], None
        if name in steps:
            lengths_B = lengths[steps[name]]
            is_step_BT = torch.arange(x.shape[1]) < lengths_B[:, None]
            x = x[is_step_BT.to(x.device)]
        for title, tensor in read_fields(fields, types[root(name)], x, top_k).items():
            columns[f"{name}/{title}"] = Column(_on_host(tensor), lengths_B)
    return columns


def _on_host(x: Tensor) -> Tensor:
    """Return a tensor in host memory; bfloat16, which numpy does not have, as float32."""
    return (x.float() if x.dtype == torch.bfloat16 else x).cpu().contiguous()


class _Parts:
    """Computes the parts of all rows that are not stored yet, together with other processes."""

    def __init__(
        self,
        predictor: Predictor,
        rows: Rows,
        *,
        control: RunControl,
        out: Outputs,
        group: Group,
        stored: Mapping[str, Path],
    ) -> None:
        self._predictor, self._rows = predictor, rows
        self._control, self._out, self._group = control, out, group
        self._plan = Plan(rows.num_rows, predictor.batch_size)
        self._directory = out.directory / "parts"
        self._directory.mkdir(exist_ok=True)
        self._done: dict[int, Part] = {}
        self._held: PartWriter | None = None
        """The only part, if it is small and stays in memory."""
        for number in range(self._plan.num_parts):
            path = stored.get(self._plan.name(number))
            part = None if path is None else Part.read(path, self._plan.mark(number))
            if part is not None:
                self._done[number] = part
        self._num_stored = self._rows_in(self._done)
        self._progress = Progress(rows.num_rows, predictor.batch_size, out, self._num_stored)

    def run(self) -> "Done | None":
        """Return all outputs; None: the job was asked to end."""
        size = self._group.size
        missing = [n for n in range(self._plan.num_parts) if n not in self._done]
        mine = missing[self._group.rank :: size]
        numbers = chain.from_iterable(map(self._plan.batches, mine))
        batches = self._rows.stored(self._predictor.batch_size, numbers)
        rounds = range(-(-len(missing) // size))
        with torch.inference_mode():
            for turn in rounds:
                number = mine[turn] if turn < len(mine) else None
                writer = None if number is None else self._compute(number, batches)
                if not self._agree(number, writer, missing[turn * size : (turn + 1) * size]):
                    return None
        if not self._group.is_first:
            return Done(self._rows.num_rows, Shapes(), list, has_gaps=False)
        self._progress.report(self._rows.num_rows)
        return self._whole()

    def _compute(self, number: int, batches: Iterator[Batch]) -> PartWriter | None:
        """Return a part with all its rows; None: the job was asked to end."""
        plan = self._plan
        writer = PartWriter(self._directory / plan.name(number), plan.mark(number))
        for _ in plan.batches(number):
            if self._control.cancel_requested:
                writer.drop()
                return None
            writer.add(self._predictor(next(batches)))
            done = writer.shapes.num_rows * self._group.size  # the others are about as far
            self._progress.reached(self._num_stored + done)
        return writer

    def _agree(self, number: int | None, writer: PartWriter | None, turn: Sequence[int]) -> bool:
        """Store the parts of one turn of all processes; return whether the next may begin."""
        own: str | None = None
        if writer is not None and number is not None:
            if self._plan.num_parts == 1 and writer.is_in_memory and self._group.is_alone:
                self._held = writer
            else:
                part = writer.close()
                own, self._done[number] = str(part.path), part
        found = self._group.gather(own)
        is_ended = self._control.cancel_requested
        if self._group.is_first:
            for place, path in zip(turn, found, strict=False):
                self._store(place, path)
        return not self._group.broadcast(is_ended)

    def _store(self, number: int, path: str | None) -> None:
        """Report a part of this or another process, which is a file that the worker stores."""
        if path is None:
            return
        if number not in self._done:
            part = Part.read(Path(path), self._plan.mark(number))
            if part is None:
                raise RuntimeError(f"part {number} of another process cannot be read")
            self._done[number] = part
        name = self._plan.name(number)
        linked = self._out.directory / "artifacts" / name
        linked.hardlink_to(path)  # the worker moves the link, and the part is still read
        report_file(linked, parts.MEDIA_TYPE, self._out)
        self._num_stored += self._plan.rows_of(number)
        self._out.flush()
        failpoint("infer.part_stored")

    def _rows_in(self, numbers: Mapping[int, Part]) -> int:
        return sum(self._plan.rows_of(number) for number in numbers)

    def _whole(self) -> "Done":
        has_gaps = not self._rows.takes_all
        if self._held is not None:
            held = self._held.held
            return Done(self._rows.num_rows, self._held.shapes, lambda: held, has_gaps=has_gaps)
        shapes = Shapes()
        ordered = [self._done[number] for number in sorted(self._done)]
        for part in ordered:
            shapes.join(part.shapes)
        names = tuple(self._plan.name(number) for number in sorted(self._done))
        blocks: Blocks = lambda: chain.from_iterable(part.blocks() for part in ordered)  # noqa: E731
        return Done(self._rows.num_rows, shapes, blocks, names, has_gaps=has_gaps)


class Done:
    """The outputs of all rows."""

    def __init__(
        self,
        num_rows: int,
        shapes: Shapes,
        blocks: Blocks,
        stored: Sequence[str] = (),
        *,
        has_gaps: bool,
    ) -> None:
        self.num_rows, self.shapes, self.blocks = num_rows, shapes, blocks
        self.stored = stored
        """The names of the files of parts."""
        self.has_gaps = has_gaps
        """Whether rows of the split were dropped."""


def _write(job: InferJob, predictor: Predictor, done: Done, out: Outputs) -> None:
    """Write the result files; also emit small results as an event."""
    out.flush()
    known = predictor.known
    directory = out.directory / "artifacts"
    tensors = files.tensors_of(
        job, predictor.wanted, done.blocks, done.shapes, has_gaps=done.has_gaps
    )
    path = directory / f"outputs.{job.format}"
    files.write(path, job, tensors, done.blocks, known)
    report_file(path, files.MEDIA_TYPES[job.format], out)
    if _write_predictions(directory / PREDICTIONS, job, done, known):
        report_file(directory / PREDICTIONS, "text/csv", out)
    report_bad_rows(directory, out)
    found = _small(tensors, known)
    classes = {name: item for name, item in tensors.items() if name.rpartition("/")[0] in known}
    if found is None and classes:  # the classes alone may be small
        found = _small({n: item for n, item in classes.items() if n[-6:] != "/value"}, known)
    if found is not None:
        out.emit({"type": "result", "at": now(), "result": found})
    if done.stored:
        out.emit({"type": "artifacts_removed", "at": now(), "names": [*done.stored]})


def _write_predictions(path: Path, job: InferJob, done: Done, known: Mapping[str, Classes]) -> bool:
    """Write a line per row: its number, and each layer's class and its probability.

    Return whether there is anything to write.
    """
    names = [
        name
        for name, shape in done.shapes.columns.items()
        if name.rpartition("/")[0] in known
        and name.rpartition("/")[2] in ("id", "prob")
        and shape.longest is None
    ]
    layers = {name.rpartition("/")[0] for name in names if name.endswith("/id")}
    names = [name for name in names if name.rpartition("/")[0] in layers]
    if not names or job.flatten is not False:
        return False

    def chosen() -> Iterator[Block]:
        for block in done.blocks():
            yield Block(block.rows, {name: block.columns[name] for name in names})

    files.write_csv(path, chosen, known)
    return True


def _small(tensors: Mapping[str, Whole], known: Mapping[str, Classes]) -> dict[str, Any] | None:
    """Return the results as JSON; None: there are none, or they are too large."""
    if not tensors or sum(item.num_bytes for item in tensors.values()) > RESULT_BYTES:
        return None
    whole = {name: item.read() for name, item in tensors.items()}
    result = as_result(whole)
    for name, classes in known.items():
        if f"{name}/id" in whole or f"{name}/top_k" in whole:
            result[name] |= told(classes, name, whole)
    return result if len(jsonio.dumps(result)) <= RESULT_JSON_BYTES else None


def as_result(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Convert tensors named ``layer/field`` to nested JSON; a joined one has only its field."""
    result: dict[str, Any] = {}
    for name, item in tensors.items():
        layer, _, field = name.rpartition("/")
        entry = {
            "dtype": dtype_name(item.dtype),
            "shape": list(item.shape),
            "data": item.tolist(),
        }
        (result.setdefault(layer, {}) if layer else result)[field] = entry
    return result
