"""Reads the files in which a replica records requests."""

import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from glasshouse import jsonio
from glasshouse.ids import is_id

MAX_FILE_BYTES = 16 * 2**20


def read_requests(path: Path, count: int, crc32: int) -> list[dict[str, Any]]:
    """Return the requests of a file, as `models.observations.served_requests.add` takes them.

    Args:
        path: the file: a JSON object in each line.
        count: how many it must have.
        crc32: the CRC-32 of its bytes.

    Raises:
        OSError: it is not there.
        ValueError: it is damaged.
    """
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES or zlib.crc32(content) != crc32:
        raise ValueError("the file is damaged")
    lines = content.split(b"\n")
    if len(lines) != count:
        raise ValueError(f"the file has {len(lines)} requests, not {count}")
    try:
        return [_read(line) for line in lines]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the file has an entry that is no request: {error!r}") from error


def _read(line: bytes) -> dict[str, Any]:
    found = jsonio.loads(line)
    if not is_id(found["id"], "rec"):
        raise ValueError("the file has an entry without an id")
    code = found["code"]
    return {
        "id": found["id"],
        "at": datetime.fromisoformat(found["at"]).astimezone(UTC),
        "model": str(found["model"]),
        "version": int(found["version"]),
        "status": int(found["status"]),
        "code": None if code is None else str(code),
        "details": str(found["details"]),
    }
