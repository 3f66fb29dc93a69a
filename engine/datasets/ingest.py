"""Convert an uploaded file into a dataset directory, in a separate process with limits.

``python -m engine.datasets.ingest --format csv --source FILE --out DIR`` prints one JSON line:
``{"ok":true,"meta":{…}}`` or ``{"ok":false,"problem":{"code":…,"detail":…}}``. It exits with 0 in
both cases. Any other exit means that the process was killed, and the dataset has failed.
"""

import argparse
import errno
import os
import resource
import shutil
import signal
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from engine.datasets.digits import write_digits
from engine.datasets.formats import formats, having
from engine.datasets.reading import ReadOptions
from engine.datasets.writer import DatasetWriter, sync_directory
from glasshouse import jsonio
from glasshouse.errors import InvalidDataset, ServiceError, StorageFull
from glasshouse.spec.data import BUILTINS, size_of
from glasshouse.unpickling import refuse_unpickling

MAX_MEMORY_BYTES = 2 << 30
MAX_CPU_S = 600
MAX_OUT_BYTES = 16 << 30
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CpuTimeSpent(Exception):
    """The process has used all its CPU time."""


def ingest(
    source: Path | None,
    name: str,
    out: Path,
    *,
    max_out_bytes: int = MAX_OUT_BYTES,
    resize: tuple[int, int] | None = None,
    header: bool | None = None,
) -> dict[str, Any]:
    """Read a file of a format, or a built-in dataset, into a new directory; return its metadata.

    Args:
        source: the file; None: ``name`` is that of a built-in dataset.
        name: the name of the format.
        out: the directory. It appears only when complete; nothing is left of a failed attempt.
        max_out_bytes: the maximum number of bytes to write.
        resize: for images, the height and width of all of them.
        header: for csv and tsv, whether the first row names the columns; None: it is detected.

    Raises:
        InvalidDataset: the file cannot be read as this format.
        StorageFull: the disk is full.
    """
    temporary = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir()
        writer = DatasetWriter(temporary, max_bytes=max_out_bytes)
        if source is None:
            if name != "digits":
                raise InvalidDataset(f"{name!r} is not a built-in dataset; there is: digits")
            write_digits(writer)
        else:
            options = ReadOptions(max_out_bytes, header=header, resize=resize)
            _read(source, name, writer, options)
        meta = writer.finish()
        temporary.rename(out)
        sync_directory(out.parent)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise StorageFull(
                "there is no room on the disk for the dataset; free some, then upload it again"
            ) from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return meta


def _read(source: Path, name: str, writer: DatasetWriter, options: ReadOptions) -> None:
    status = source.stat()
    if not stat.S_ISREG(status.st_mode):
        raise InvalidDataset("the source is not a regular file")
    if status.st_size == 0:
        raise InvalidDataset("the file is empty")
    found = formats().get(name)
    if found is None:
        raise InvalidDataset(
            f"{name!r} is not a format that can be read; the formats are {', '.join(formats())}"
        )
    for option, value in (("resize", options.resize), ("header", options.header)):
        if value is not None and option not in found.options:
            others = " and ".join(having(option))
            raise InvalidDataset(
                f"{option} is for {others} only, and the format is {name}: leave it out"
            )
    found.read(source, writer, options)


def limit_process(*, max_memory_bytes: int, max_cpu_s: int) -> None:
    """Limit the memory and CPU time of this process, whatever the file contains."""
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, max_memory_bytes)
    # Two seconds later the kernel kills a process that could not report the problem itself.
    _limit(resource.RLIMIT_CPU, max_cpu_s, hard=max_cpu_s + 2)
    signal.signal(signal.SIGXCPU, _on_cpu_limit)
    signal.signal(signal.SIGTERM, _on_terminate)


def _limit(kind: int, soft: int, *, hard: int | None = None) -> None:
    ceiling = resource.getrlimit(kind)[1]
    values = [soft, soft if hard is None else hard]
    if ceiling != resource.RLIM_INFINITY:
        values = [min(value, ceiling) for value in values]
    with suppress(ValueError, OSError):  # macOS defines some limits that it cannot set
        resource.setrlimit(kind, (values[0], values[1]))


def _on_cpu_limit(_signal: int, _frame: FrameType | None) -> None:
    raise CpuTimeSpent


def _on_terminate(signal_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signal_number)  # so that the partial output is removed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = _parse(arguments)
    refuse_unpickling()
    limit_process(max_memory_bytes=options.max_memory_bytes, max_cpu_s=options.max_cpu_s)
    try:
        meta = ingest(
            options.source,
            options.builtin or options.format,
            options.out,
            max_out_bytes=options.max_out_bytes,
            resize=options.resize,
            header=options.header,
        )
        answer: dict[str, Any] = {"ok": True, "meta": meta}
    except ServiceError as error:
        answer = _problem(error)
    except MemoryError:
        most = f"{options.max_memory_bytes:,} bytes of memory"
        answer = _problem(_too_much(most, "make its rows smaller"))
    except CpuTimeSpent:
        answer = _problem(_too_much(f"{options.max_cpu_s} s of processor time", "upload less"))
    sys.stdout.write(jsonio.dumps(answer) + "\n")
    return 0


def _too_much(most: str, fix: str) -> InvalidDataset:
    what = f"reading the file takes more than the {most} that it may"
    return InvalidDataset(f"{what}; {fix}, or raise the limit")


def _problem(error: ServiceError) -> dict[str, Any]:
    return {"ok": False, "problem": {"code": error.code, "detail": error.detail}}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine.datasets.ingest", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--format", choices=[*formats()])
    what.add_argument("--builtin", choices=[*BUILTINS])
    parser.add_argument("--source", type=Path, help="the uploaded file")
    parser.add_argument("--out", type=Path, required=True, help="the directory to make")
    parser.add_argument(
        "--resize", type=size_of, metavar="HxW", help="of images: height and width, as in 32x32"
    )
    parser.add_argument(
        "--header",
        action=argparse.BooleanOptionalAction,
        help="of csv and tsv: whether the first row names the columns; left unset, it is found out",
    )
    parser.add_argument("--max-memory-bytes", type=int, default=MAX_MEMORY_BYTES)
    parser.add_argument("--max-cpu-s", type=int, default=MAX_CPU_S)
    parser.add_argument("--max-out-bytes", type=int, default=MAX_OUT_BYTES)
    options = parser.parse_args(arguments)
    if (options.source is None) != (options.builtin is not None):
        parser.error("--source belongs to --format, and only to it")
    return options


if __name__ == "__main__":
    sys.exit(main())
