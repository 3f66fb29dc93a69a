"""Frames: whatever pieces the bytes come in, and whatever a hostile peer sends."""

import numpy as np
import pytest

from glasshouse import frames
from glasshouse.frames import Frame, FrameError, FrameReader, Kind

SENT = [
    Frame(Kind.REQUEST, 1, {"reference": "mnist@production", "timeout_s": 1.5}, b"\x00" * 5000),
    Frame(Kind.CANCEL, 2**63, {}, b""),
    Frame(Kind.ANSWER, 7, {"status": 200, "größe": "ü"}, b"{}"),
    Frame(Kind.CLOSING, 0, {}, b""),
]
BYTES = b"".join(
    part for frame in SENT for part in map(bytes, frames.pack_parts(*frame))
)  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_frames_come_back_whatever_pieces_they_arrive_in(seed: int):
    drawn, reader, found, place = np.random.default_rng(seed), FrameReader(), [], 0
    while place < len(BYTES):
        size = drawn.choice([1, 2, 3, 16, 17, 1000, 100_000])
        found += reader.feed(BYTES[place : place + size])
        place += size
    assert found == SENT


def test_a_frame_that_is_longer_than_allowed_is_refused_before_its_bytes_come():
    reader = FrameReader(1000)
    with pytest.raises(FrameError, match="at most 1000"):
        list(reader.feed((1001).to_bytes(4, "big")))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((3).to_bytes(4, "big") + b"abc", "shorter than its prefix"),
        (frames.pack(Kind.CANCEL)[:13] + (99).to_bytes(4, "big") + b"{}", "shorter than its head"),
        (frames.pack(Kind.CANCEL, 0).replace(b"{}", b"[]"), "no object"),
        (frames.pack(Kind.CANCEL, 0).replace(b"{}", b"{x"), "cannot be read"),
        (frames.pack(Kind.CANCEL, 0).replace(b"{}", b"\xff\xfe"), "cannot be read"),
        (frames.pack(Kind.CANCEL)[:4] + b"\x63" + frames.pack(Kind.CANCEL)[5:], "cannot be read"),
    ],
)
def test_bytes_that_are_no_frame_are_refused(data: bytes, message: str):
    with pytest.raises(FrameError, match=message):
        list(FrameReader().feed(data))


def test_a_head_that_is_nested_too_deeply_is_refused():
    head = b"[" * 100_000
    prefix = frames.pack(Kind.REQUEST)[4:13] + len(head).to_bytes(4, "big")
    with pytest.raises(FrameError):
        list(FrameReader().feed((len(prefix) + len(head)).to_bytes(4, "big") + prefix + head))


def test_a_proof_is_of_one_token_one_side_and_both_challenges():
    mine, theirs = frames.new_challenge(), frames.new_challenge()
    assert mine != theirs
    found = frames.proof("token", "api", mine, theirs)
    assert frames.is_proof(found, "token", "api", mine, theirs)
    assert not frames.is_proof(found, "other", "api", mine, theirs)
    assert not frames.is_proof(found, "token", "replica", mine, theirs)
    assert not frames.is_proof(found, "token", "api", theirs, mine)
    assert not frames.is_proof(found, "token", "api", mine, frames.new_challenge())
    assert not frames.is_proof(None, "token", "api", mine, theirs)
    assert not frames.is_proof("ü", "token", "api", mine, theirs)
