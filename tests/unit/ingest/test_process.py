import gzip
import io
import os
import resource
import signal
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from engine.datasets.digits import NUM_DIGITS
from engine.datasets.formats import formats
from engine.datasets.ingest import ingest
from glasshouse.errors import StorageFull
from models.storage.columns import DatasetColumns
from tests.unit.ingest.conftest import Ingesting

BASE_BYTES = 64 << 20  # python, numpy and one block; measured at about 30 MB


def zip_of(*members: zipfile.ZipInfo | str, content: bytes = b"x") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for member in members:
            archive.writestr(member, content)
    return file.getvalue()


def special(mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("train-images")
    info.create_system = 3
    info.external_attr = mode << 16
    return info


def test_the_engine_reads_files_without_torch():
    code = "import sys, engine.datasets.ingest;"
    code += "print([m for m in ('torch','sklearn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"


def test_the_digits_are_scikit_learns_and_written_without_importing_it(tmp_path: Path):
    code = "import sys, engine.datasets.ingest as ingest;"
    code += "print(ingest.main(sys.argv[1:]), 'sklearn' in sys.modules)"
    command = [sys.executable, "-c", code, "--builtin", "digits", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 False"
    columns = DatasetColumns(tmp_path / "out")
    pixels, classes = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(classes))
    images = np.concatenate([columns.array(split, "image") for split in NUM_DIGITS])
    labels = np.concatenate([columns.array(split, "label") for split in NUM_DIGITS])
    np.testing.assert_array_equal(images.reshape(-1, 64), (pixels / 16).astype(np.float32)[order])
    np.testing.assert_array_equal(labels, classes[order])


def test_the_command_answers_with_one_line(ingesting: Ingesting):
    done = ingesting.process("csv", ingesting.file(b"a,b\n1,2\n"))
    assert done["status"] == 0
    assert done["answer"]["ok"] is True
    assert done["answer"]["meta"] == DatasetColumns(done["out"]).meta
    assert sorted(path.name for path in done["out"].iterdir()) == ["all", "meta.json", "stats.json"]
    refused = ingesting.process("csv", ingesting.file(b"a,b\n1\n"))
    assert refused["status"] == 0
    assert refused["answer"]["ok"] is False
    assert refused["answer"]["problem"]["code"] == "invalid_dataset"
    assert "line 2" in refused["answer"]["problem"]["detail"]
    assert refused["left"] == []


@pytest.mark.long
def test_a_bomb_ends_with_a_problem_in_bounded_memory(ingesting: Ingesting):
    zeros = b"[[[" + b"[" + b"0," * (50 << 20)
    for name, content in [
        ("mnist.json.gz", gzip.compress(zeros, 1, mtime=0)),
        ("idx.gz", gzip.compress(b"\0\0\x08\x01\x06\0\0\0" + bytes(100 << 20), 1, mtime=0)),
        ("csv", b'a\n"' + b"x\n" * (5 << 20)),
    ]:
        done = ingesting.process(name, ingesting.file(content))
        assert done["status"] == 0
        assert done["answer"]["ok"] is False
        assert done["peak_bytes"] < BASE_BYTES + (64 << 20)
        assert done["left"] == []


def test_many_rows_take_no_more_memory_than_few(ingesting: Ingesting):
    images = np.zeros((60_000, 28, 28), np.uint8)
    images[::7] = 200
    content = b"\0\0\x08\x03" + struct.pack(">3I", *images.shape) + images.tobytes()
    done = ingesting.process("idx", ingesting.file(content))
    assert done["answer"]["meta"]["splits"] == {"all": 60_000}
    assert done["peak_bytes"] < BASE_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not enforce RLIMIT_AS")
def test_a_file_that_needs_more_memory_than_it_may_is_a_problem(ingesting: Ingesting):
    text = b"\n".join([b",".join([b"1.5"] * 2000)] * 200)
    done = ingesting.process(
        "csv", ingesting.file(text), "--max-memory-bytes", str(_base_address_space() + (3 << 20))
    )
    assert done["status"] == 0
    assert "of memory that it may" in done["answer"]["problem"]["detail"]
    assert done["left"] == []


def _base_address_space() -> int:
    code = "import engine.datasets.ingest;"
    code += "print(open('/proc/self/statm').read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    return int(done.stdout.split()[0]) * resource.getpagesize()


@pytest.mark.long
def test_a_file_that_takes_too_long_is_a_problem(ingesting: Ingesting):
    content = b"a,b\n" + b"1.5,2.5\n" * 8_000_000
    done = ingesting.process("csv", ingesting.file(content), "--max-cpu-s", "1")
    assert done["status"] == 0
    assert "more than the 1 s of processor time" in done["answer"]["problem"]["detail"]
    assert done["left"] == []


def test_a_full_disk_is_reported_and_leaves_nothing(ingesting: Ingesting, tmp_path: Path):
    source = ingesting.file(b"\0\0\x08\x01\x00\x10\x00\x00" + bytes(1 << 20))
    code = (
        "import resource, sys; from engine.datasets.ingest import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)); main(sys.argv[1:])"
    )
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", code, "--format", "idx", "--source", source, "--out", out],
        capture_output=True,
        check=True,
        text=True,
    )
    assert '"code":"storage_full"' in done.stdout
    assert list(tmp_path.glob("out*")) == []
    assert StorageFull().code == "storage_full"


def test_a_terminated_ingest_removes_what_it_began(ingesting: Ingesting, tmp_path: Path):
    source = ingesting.file(b"a,b\n" + b"1.5,2.5\n" * 8_000_000)
    command = [sys.executable, "-m", "engine.datasets.ingest", "--format", "csv"]
    with subprocess.Popen([*command, "--source", source, "--out", tmp_path / "out"]) as process:
        while not list(tmp_path.glob("out.tmp-*")):
            assert process.poll() is None
            os.sched_yield()
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    assert list(tmp_path.glob("out*")) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (zip_of("../../evil"), "points outside it"),
        (zip_of("/etc/passwd"), "points outside it"),
        (zip_of("C:\\evil"), "points outside it"),
        (zip_of("a\\..\\..\\evil"), "points outside it"),
        (zip_of("line\nbreak"), "points outside it"),
        (zip_of(special(0o120777), content=b"/etc/passwd"), "not a regular file"),
        (zip_of(special(0o010644)), "not a regular file"),
        (zip_of(special(0o020644)), "not a regular file"),
        (zip_of("Train", "train"), "twice"),
        (zip_of("x" * 60_000), "begins with"),
        (zip_of(*(f"f{i}" for i in range(1001))), "lists 1,001 files"),
        (zip_of("train-images")[:-1], "not a zip archive"),
        (b"PK\x05\x06" + b"\xff" * 18, "lies outside it"),
        (b"not a zip", "not a zip archive"),
    ],
)
@pytest.mark.parametrize("name", ["idx.zip", "npz"])
def test_a_hostile_archive_is_a_problem(ingesting: Ingesting, name: str, content: bytes, says: str):
    detail = ingesting.problem(name, content)
    assert says in detail or (name == "npz" and "is not an array" in detail)


def test_a_hundred_thousand_entries_are_refused_unread(ingesting: Ingesting):
    entry = b"PK\x01\x02" + bytes(24) + struct.pack("<H", 1) + bytes(16) + b"f"
    directory = entry * 100_000
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, len(directory), 0, 0)
    end64 = struct.pack(
        "<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 100_000, 100_000, len(directory), 0
    )
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, len(directory), 1)
    content = directory + end64 + locator + end
    assert "lists" in ingesting.problem("npz", content)
    assert "lists 100,000 files" in ingesting.problem(
        "npz",
        content.replace(end, end.replace(struct.pack("<L", len(directory)), b"\xff\xff\xff\xff")),
    )


def test_a_nested_archive_is_a_file_of_an_unknown_kind(ingesting: Ingesting):
    inner = zip_of("train-images")
    assert "begins with 50 4b 03 04" in ingesting.problem("idx.zip", zip_of("a", content=inner))


def test_a_path_that_is_not_a_regular_file_is_refused(ingesting: Ingesting, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        assert "not a regular file" in ingesting.problem("csv", path)


@pytest.mark.parametrize("name", formats())
def test_random_bytes_are_a_problem_in_every_format(ingesting: Ingesting, name: str):
    rubbish = np.random.default_rng(0).bytes(5000)
    assert ingesting.problem(name, rubbish)
    assert ingesting.problem(name, b"")


def test_an_unknown_format_is_a_problem_that_lists_the_known(ingesting: Ingesting):
    assert "the formats are csv, idx" in ingesting.problem("pickle", b"x")


def test_the_digits_are_in_three_splits_that_share_no_row(tmp_path: Path):
    meta = ingest(None, "digits", tmp_path / "digits")
    assert meta["splits"] == NUM_DIGITS == {"train": 1297, "validation": 250, "test": 250}
    columns = DatasetColumns(tmp_path / "digits")
    assert [column["shape"] for column in meta["columns"]] == [[1, 8, 8], []]
    images = np.concatenate([columns.array(split, "image") for split in NUM_DIGITS])
    labels = np.concatenate([columns.array(split, "label") for split in NUM_DIGITS])
    assert images.dtype == np.float32
    assert (images.min(), images.max()) == (0, 1)
    assert len(np.unique(images.reshape(1797, -1), axis=0)) == 1797
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert columns.array("train", "label")[:8].tolist() == [2, 8, 2, 6, 6, 7, 1, 9]
