"""The clients of `bench.training.predicting`: each sends its next request when it has an answer."""

import contextlib
import json
import socket
import statistics
import sys
import time

from glasshouse import frames
from glasshouse.frames import Frame, FrameReader, Kind

HEAD = {"reference": "job", "protocol": "predict", "content_type": "application/json"}
BODY = json.dumps({"inputs": {"image": [[[[0.0] * 28] * 28]]}}).encode()


class Clients:
    """Several clients on one connection."""

    def __init__(self, peer: socket.socket, token: str, clients: int) -> None:
        self.latencies: list[float] = []
        self._peer, self._token, self._clients = peer, token, clients
        self._challenge = frames.new_challenge()
        self._sent: dict[int, float] = {}
        self._number = 0

    def hear(self, frame: Frame) -> None:
        """Prove the token, then send requests."""
        if frame.kind is Kind.CHALLENGE:
            theirs = str(frame.head["challenge"])
            proof = frames.proof(self._token, "api", theirs, self._challenge)
            answer = {"challenge": self._challenge, "proof": proof}
            self._peer.sendall(frames.pack(Kind.PROOF, 0, answer))
        elif frame.kind is Kind.PROOF:
            for _ in range(self._clients):
                self._send()
        elif frame.kind is Kind.ANSWER:
            self.latencies.append(time.perf_counter() - self._sent.pop(frame.number))
            self._send()

    def _send(self) -> None:
        self._number += 1
        self._sent[self._number] = time.perf_counter()
        parts = frames.pack_parts(Kind.REQUEST, self._number, HEAD, BODY)
        self._peer.sendall(b"".join(map(bytes, parts)))


def main(address: str, token: str, clients: int) -> None:
    """Send requests with one row until the job closes the connection; print what was measured."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(address.removeprefix("unix:"))
        reader, mine = FrameReader(), Clients(peer, token, clients)
        with contextlib.suppress(ConnectionError):
            while data := peer.recv(1 << 20):
                for frame in reader.feed(data):
                    mine.hear(frame)
    latencies = mine.latencies or [float("nan")]
    found = {"answers": len(mine.latencies), "latency_s": statistics.median(latencies)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
