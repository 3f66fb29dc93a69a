"""Hostile peers: of a replica's socket, and a process that claims to be a replica."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from glasshouse import frames
from glasshouse.frames import Frame, FrameReader, Kind
from models.tables import Replica
from tests.integration.serving.service import Service


class Peer:
    """Somebody who connects to a replica."""

    def __init__(self, address: str) -> None:
        kind, _, where = address.partition(":")
        assert kind == "unix"
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        self.socket.connect(where)
        self._reader = FrameReader()
        self._frames: list[Frame] = []

    def read(self) -> Frame | None:
        """The next frame; None: the replica closed the connection."""
        while not self._frames:
            try:
                data = self.socket.recv(65536)
            except ConnectionError:
                return None
            if not data:
                return None
            self._frames += self._reader.feed(data)
        return self._frames.pop(0)

    def send(self, data: bytes) -> None:
        """Send bytes, unless the replica has closed the connection."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(data)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def greet(self, token: str) -> str:
        """Prove with a token; return the replica's challenge."""
        first = self.read()
        assert first is not None
        assert first.kind is Kind.CHALLENGE
        theirs, own = str(first.head["challenge"]), frames.new_challenge()
        proof = frames.proof(token, "api", theirs, own)
        self.send(frames.pack(Kind.PROOF, 0, {"challenge": own, "proof": proof}))
        return theirs


def wrong_token(peer: Peer, _token: str) -> None:
    peer.greet("x" * 43)


def own_challenge_sent_back(peer: Peer, token: str) -> None:
    """The proof of the replica's side does not do for the other side."""
    first = peer.read()
    assert first is not None
    theirs = str(first.head["challenge"])
    proof = frames.proof(token, "replica", theirs, theirs)
    peer.send(frames.pack(Kind.PROOF, 0, {"challenge": theirs, "proof": proof}))


def replayed_proof(peer: Peer, token: str) -> None:
    """What another connection has proved does not do for this one."""
    with Peer(f"unix:{peer.socket.getpeername()}") as other:
        theirs, own = other.greet(token), frames.new_challenge()
    assert peer.read() is not None
    proof = frames.proof(token, "api", theirs, own)
    peer.send(frames.pack(Kind.PROOF, 0, {"challenge": own, "proof": proof}))


def request_before_the_proof(peer: Peer, _token: str) -> None:
    assert peer.read() is not None
    peer.send(frames.pack(Kind.REQUEST, 1, {"reference": "m"}))


def proof_of_another_type(peer: Peer, _token: str) -> None:
    assert peer.read() is not None
    peer.send(frames.pack(Kind.PROOF, 0, {"challenge": ["x"], "proof": {"a": 1}}))


def garbage(peer: Peer, _token: str) -> None:
    assert peer.read() is not None
    peer.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


def frame_of_4_gib(peer: Peer, _token: str) -> None:
    assert peer.read() is not None
    peer.send(struct.pack(">I", 2**32 - 1))


def long_greeting(peer: Peer, _token: str) -> None:
    assert peer.read() is not None
    peer.send(frames.pack(Kind.PROOF, 0, {"challenge": "x" * 5000}))


def head_longer_than_the_frame(peer: Peer, token: str) -> None:
    peer.greet(token)
    proved = peer.read()
    assert proved is not None
    assert proved.kind is Kind.PROOF
    peer.send(struct.pack(">IBQI", 13, Kind.REQUEST, 1, 2**31))


def deep_head(peer: Peer, token: str) -> None:
    peer.greet(token)
    assert peer.read() is not None
    head = b"[" * 100_000
    peer.send(struct.pack(">IBQI", 13 + len(head), Kind.REQUEST, 1, len(head)) + head)


WAYS: list[Callable[[Peer, str], None]] = [
    wrong_token,
    own_challenge_sent_back,
    replayed_proof,
    request_before_the_proof,
    proof_of_another_type,
    garbage,
    frame_of_4_gib,
    long_greeting,
    head_longer_than_the_frame,
    deep_head,
]


def test_a_replica_closes_the_connections_of_hostile_peers(service: Service):
    """And answers others meanwhile."""
    name = f"m-{uuid4().hex[:8]}"
    service.publish(name, service.checkpoint())
    job = service.serve(name)
    replica = service.replica(job)
    silent = [Peer(replica.address) for _ in range(20)]
    for way in WAYS:
        with Peer(replica.address) as peer:
            way(peer, replica.token)
            assert peer.read() is None, way.__name__
        assert service.predict(name).version == 1, way.__name__
    for peer in silent:
        peer.socket.close()
    assert service.harness.job(job).attempt == 1
    mode = Path(replica.address.removeprefix("unix:")).stat().st_mode & 0o777
    assert mode == 0o600


@pytest.mark.parametrize(
    "head",
    [
        {},
        {"reference": 5},
        {"reference": "m", "timeout_s": "x"},
        {"reference": "m", "priority": []},
    ],
)
def test_a_peer_that_knows_the_token_can_break_only_its_own_request(
    service: Service, head: dict[str, Any]
):
    service.publish("m", service.checkpoint())
    job = service.serve("m")
    replica = service.replica(job)
    with Peer(replica.address) as peer:
        peer.greet(replica.token)
        assert peer.read() is not None
        peer.send(b"".join(map(bytes, frames.pack_parts(Kind.REQUEST, 7, head, b"{}"))))
        answer = peer.read()
    assert answer is not None
    assert (answer.kind, answer.number) == (Kind.ANSWER, 7)
    assert answer.head["status"] >= 400
    assert service.predict("m").status == 200


@pytest.mark.parametrize("proves", [True, False])
def test_the_api_refuses_a_process_that_does_not_know_the_token(
    service: Service, proves: bool, tmp_path: Path
):
    """It gets neither a request nor the token."""
    name = f"m-{uuid4().hex[:8]}"
    service.publish(name, service.checkpoint())
    job = service.serve(name)
    token = service.replica(job).token
    received: list[bytes] = []
    path = str(tmp_path / "s")

    async def fake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.pack(Kind.CHALLENGE, 0, {"challenge": frames.new_challenge()}))
        if proves:
            proof = frames.proof("x" * 43, "replica", "", "")
            writer.write(frames.pack(Kind.PROOF, 0, {"proof": proof}))
        try:
            while data := await reader.read(65536):
                received.append(data)
        finally:
            writer.close()

    async def act() -> int:
        async with await asyncio.start_unix_server(fake, path):
            return (await service.ask(name, timeout_s=2)).status

    with service.harness.database.write() as tx:
        tx.get_one(Replica, job).address = f"unix:{path}"
    assert asyncio.run(act()) in (503, 504)
    read = list(FrameReader().feed(b"".join(received)))
    assert {frame.kind for frame in read} <= {Kind.PROOF}
    assert token.encode() not in b"".join(received)
