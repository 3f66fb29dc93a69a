"""X8, X9: archives and packed files that are not what they seem, through the whole service.

Each kind of trick is tried on the reader itself in ``tests/unit/ingest``; here the API's memory,
the store and the clock are watched while it deals with them.
"""

import gzip
import io
import struct
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.security.populated_api import PopulatedApi

MIB = 1024**2
SLIPPED = "/tmp/glasshouse-slipped"  # noqa: S108 (never to be written)


def zip_of(*members: tuple[zipfile.ZipInfo | str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for info, content in members:
            archive.writestr(info, content)
    return made.getvalue()


def special(mode: int, name: str, content: bytes) -> bytes:
    info = zipfile.ZipInfo(name)
    info.create_system = 3
    info.external_attr = mode << 16
    return zip_of((info, content))


def overlapping(copies: int = 500) -> bytes:
    """Many names for one deflated kernel of zeros: 42.zip without the nesting."""
    data = bytes(10 * MIB)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    kernel = packer.compress(data) + packer.flush()
    crc = zlib.crc32(data)
    local = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 8, 0, 0, crc, len(kernel), len(data), 5, 0)
    body = local + b"a.npy" + kernel
    directory = b"".join(
        struct.pack(
            "<4s6H3L5H2L",
            *(b"PK\1\2", 20, 20, 0, 8, 0, 0, crc, len(kernel), len(data), 9, 0, 0, 0, 0, 0, 0),
        )
        + b"a%04d.npy" % number
        for number in range(copies)
    )
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, copies, copies, len(directory), len(body), 0)
    return body + directory + end


def million_entries() -> bytes:
    entry = b"PK\x01\x02" + bytes(24) + struct.pack("<H", 1) + bytes(16) + b"f"
    count, directory = 1_000_000, b""
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, 47 * count, 0)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, len(directory), 1)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return entry * 20_000 + end64 + locator + end


def lying_npy() -> bytes:
    header = (
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,)}".ljust(117) + b"\n"
    )
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


def wide_bmp() -> bytes:
    """A head that declares 60,000 x 60,000 pixels, and no pixels."""
    head = struct.pack("<I2i2H6I", 40, 60_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + head


CORPUS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "slip": ("idx.zip", lambda: zip_of((f"../../../..{SLIPPED}", b"x"))),
    "absolute": ("idx.zip", lambda: zip_of((SLIPPED, b"x"))),
    "symlink": ("idx.zip", lambda: special(0o120777, "link", b"/etc/passwd")),
    "device": ("idx.zip", lambda: special(0o020666, "null", b"")),
    "pipe": ("npz", lambda: special(0o010666, "pipe.npy", b"")),
    "socket": ("npz", lambda: special(0o140666, "socket.npy", b"")),
    "case": ("npz", lambda: zip_of(("Train.npy", b"x"), ("train.npy", b"x"))),
    "long name": ("npz", lambda: zip_of(("x" * 65_000 + ".npy", b"x"))),
    "nested": ("idx.zip", lambda: zip_of(("a.zip", zip_of(("b.zip", zip_of(("c", b"x"))))))),
    "overlapping": ("npz", overlapping),
    "many entries": ("npz", million_entries),
    "zeros in zip": ("npz", lambda: zip_of(("x.npy", bytes(400 * MIB)))),
    "zeros in gzip": ("idx.gz", lambda: gzip.compress(bytes(400 * MIB), 1)),
    "gzip in gzip": ("idx.gz", lambda: gzip.compress(gzip.compress(bytes(100 * MIB)))),
    "many gzips": ("idx.gz", lambda: gzip.compress(b"") * 50_000),
    "open lists": ("mnist.json.gz", lambda: gzip.compress(b"[" * (50 * MIB), 1)),
    "lying npy": ("npy", lying_npy),
    "lying idx": ("idx", lambda: b"\0\0\x08\x03" + b"\x7f\xff\xff\xff" * 3),
    "images slip": ("images.zip", lambda: zip_of((f"../../../..{SLIPPED}", b"x"))),
    "image of gigabytes": ("images.zip", lambda: zip_of(("cat/a.bmp", wide_bmp()))),
    "many images": ("images.zip", million_entries),
    "one line": ("csv", lambda: b"1," * (1 * MIB)),
    "one object": ("jsonl", lambda: b'{"x": ' + b"[" * (2 * MIB)),
    "one number": ("jsonl", lambda: b'{"x": 1' + b"0" * (2 * MIB) + b"}"),
    "new keys": ("jsonl", lambda: b"".join(b'{"%d": 1}\n' % n for n in range(12_000))),
    "half a parquet": ("parquet", lambda: b"PAR1" + bytes(100) + b"\xff\xff\xff\x7fPAR1"),
    "picture": ("npy", lambda: b"\x89PNG\r\n\x1a\n" + bytes(100)),
    "parquet": ("npz", lambda: b"PAR1" + bytes(100) + b"PAR1"),
    "tar": ("npz", lambda: b"x" * 257 + b"ustar\x0000" + bytes(247)),
}


@pytest.mark.parametrize("name", CORPUS)
def test_a_file_that_is_a_trap_is_refused_and_the_api_stays_small(
    populated: PopulatedApi, ada: httpx2.Client, name: str
):
    form, make = CORPUS[name]
    content = make()
    assert len(content) < 3_000_000, "the trap is larger than an upload may be"
    process = psutil.Process(populated.api.process.pid)
    before, began = process.memory_info().rss, time.monotonic()
    made = ada.post(f"/api/v1/datasets?format={form}", content=content)
    if made.status_code == 201:
        path = made.headers["location"]
        row = ada.get(path, headers={"Prefer": "wait=60"}).json()
        assert row["state"] == "failed", row
        assert row["problem"]["code"] in ("invalid_dataset", "storage_full"), row
        assert ada.delete(path).status_code == 204
    else:
        assert made.status_code in (413, 422), made.text
    assert time.monotonic() - began < 120
    assert process.memory_info().rss - before < 48 * MIB
    assert not Path(SLIPPED).exists()
    work = populated.api.settings.work / "ingest"
    assert not work.exists() or not list(work.iterdir()), "something was left"
