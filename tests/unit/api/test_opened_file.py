"""A file that is deleted while it is sent is sent whole; one that is gone before is a 404."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from api.routes.storage.files import OpenedFile
from glasshouse.errors import ArtifactNotFound

DATA = bytes(range(256)) * 1000


def send(path: Path, headers: list[tuple[bytes, bytes]]) -> tuple[int, bytes]:
    """Send a file that is deleted when its headers go out; return status and body."""
    asgi = {"version": "3.0", "spec_version": "2.4"}
    scope: dict[str, Any] = {"type": "http", "asgi": asgi, "method": "GET", "headers": headers}
    seen: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def take(message: Any) -> None:
        seen.append(message)
        await asyncio.to_thread(path.unlink, missing_ok=True)

    asyncio.run(OpenedFile(path, filename="x.arrow")(scope, receive, take))
    return seen[0]["status"], b"".join(message.get("body", b"") for message in seen[1:])


@pytest.mark.parametrize(
    ("headers", "status", "body"),
    [([], 200, DATA), ([(b"range", b"bytes=100-299")], 206, DATA[100:300])],
)
def test_a_file_that_is_deleted_meanwhile_is_sent_whole(
    tmp_path: Path, headers: list[tuple[bytes, bytes]], status: int, body: bytes
):
    path = tmp_path / "part.arrow"
    path.write_bytes(DATA)
    before = len(os.listdir("/dev/fd"))
    assert send(path, headers) == (status, body)
    assert not path.exists()
    assert len(os.listdir("/dev/fd")) == before


def test_a_file_that_is_gone_is_not_found(tmp_path: Path):
    with pytest.raises(ArtifactNotFound, match=r"x\.arrow"):
        send(tmp_path / "gone", [])
