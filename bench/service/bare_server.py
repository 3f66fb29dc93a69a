"""The trained network behind a bare FastAPI endpoint: an opponent of ``bench.service.serving``.

``python -m bench.service.bare_server NETWORK WEIGHTS PORT THREADS``. One uvicorn worker, and three
ways to write the endpoint; the benchmark keeps the fastest.
"""

import sys
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from bench.service.served_networks import answer, load

ENDPOINTS = {
    "/validated_in_thread": "def, pydantic",
    "/validated": "async def, pydantic",
    "/parsed": "async def, request.json()",
}


class Images(BaseModel):
    image: list[list[list[list[float]]]]


class Texts(BaseModel):
    text: list[list[int]]


def create_app(name: str, weights: str) -> FastAPI:
    """Return the app with the three endpoints."""
    network = load(name, weights)
    field, model = ("image", Images) if name == "mnist_cnn" else ("text", Texts)

    class Body(BaseModel):
        inputs: model

    app = FastAPI()

    def predicted(values: Any) -> dict[str, Any]:
        with torch.inference_mode():
            return answer(network(torch.tensor(values)))

    @app.post("/validated_in_thread")
    def validated_in_thread(body: Body) -> dict[str, Any]:
        return predicted(getattr(body.inputs, field))

    @app.post("/validated")
    async def validated(body: Body) -> dict[str, Any]:
        return predicted(getattr(body.inputs, field))

    @app.post("/parsed")
    async def parsed(request: Request) -> JSONResponse:
        return JSONResponse(predicted((await request.json())["inputs"][field]))

    return app


def main(name: str, weights: str, port: str, threads: str) -> None:
    """Serve until a signal arrives."""
    torch.set_num_threads(int(threads))
    uvicorn.run(create_app(name, weights), port=int(port), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
