"""The trained network in LitServe: an opponent of ``bench.service.serving``.

``PYTHON -m bench.service.litserve_server NETWORK WEIGHTS PORT THREADS MAX_BATCH_SIZE
BATCH_TIMEOUT``, with the Python of an environment that has LitServe.
"""

import sys
from typing import Any

import litserve
import torch
from torch import Tensor

from bench.service.served_networks import answer, joined, load


class Api(litserve.LitAPI):
    """The methods that LitServe calls for a request or a batch, in this order."""

    def __init__(self, name: str, weights: str, threads: int, **options: Any) -> None:
        super().__init__(**options)
        self._name, self._weights, self._threads = name, weights, threads

    def setup(self, device: str) -> None:
        torch.set_num_threads(self._threads)
        self._network = load(self._name, self._weights).to(device)

    def decode_request(self, request: dict[str, Any]) -> Tensor:
        (values,) = request["inputs"].values()
        return torch.tensor(values[0])

    def batch(self, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        return joined(inputs)

    def predict(self, x: Tensor | tuple[Tensor, ...]) -> Tensor:
        with torch.inference_mode():
            return self._network(x[None]) if isinstance(x, Tensor) else self._network(*x)

    def unbatch(self, output: Tensor) -> list[Tensor]:
        return [*output.split(1)]

    def encode_response(self, output: Tensor) -> dict[str, Any]:
        return answer(output)


def main(name: str, weights: str, port: str, threads: str, size: str, timeout: str) -> None:
    """Serve until a signal arrives."""
    options = {"max_batch_size": int(size), "batch_timeout": float(timeout)}
    api = Api(name, weights, int(threads), **options)
    server = litserve.LitServer(api, accelerator="cpu")
    server.run(host="127.0.0.1", port=int(port), log_level="warning", generate_client_file=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
