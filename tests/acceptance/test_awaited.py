"""The awaited client against the real service: modules, frames, sequences, there and back."""

import asyncio

import numpy as np
import pandas as pd
import torch
from torch import nn

import glasshouse as gh
from tests.acceptance.services import LocalService

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 4)).astype(np.float32)
Y = (X.sum(axis=1) > 0).astype(np.int64)
SCORES = [{"name": "scores", "type": "Linear", "args": {"out_features": 2}}]


class Small(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 8)
        self.scores = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(torch.relu(self.hidden(x)))


def test_a_module_is_traced_trained_and_filled_again_while_the_loop_continues(
    local_service: LocalService,
):
    module = Small()
    before = module.scores.weight.detach().clone()

    async def train() -> tuple[np.ndarray, int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        async with gh.AsyncClient(local_service.url, local_service.key) as client:
            ticking = asyncio.create_task(tick())
            job = await client.train(module, (X, Y), epochs=2, seed=1)
            await job.wait()
            await job.load_into(module)
            scores = (await client.infer(job, X[:10]))["scores"]
            ticking.cancel()
            return scores, ticks

    scores, ticks = asyncio.run(train())
    assert ticks > 10
    assert not torch.equal(module.scores.weight, before)
    with torch.no_grad():
        np.testing.assert_allclose(module(torch.from_numpy(X[:10])), scores, rtol=1e-5, atol=1e-6)


def test_frames_rows_of_different_lengths_and_probes_go_there_and_back(local_service: LocalService):
    frame = pd.DataFrame(X, columns=list("abcd")).assign(label=Y)
    texts = [RNG.integers(0, 9, size=length) for length in RNG.integers(2, 7, size=60)]

    async def work() -> None:
        async with gh.AsyncClient(local_service.url, local_service.key) as client:
            inputs = [{**SCORES[0], "inputs": ["x"]}]
            job = await client.train(inputs, frame, label="label", validation=0.25, steps=200)
            probe = await job.probe("scores", want="full", every=1)
            await job.wait()
            assert (await probe.refresh()).state in ("active", "rejected")
            losses = await job.metrics(["loss", "validation/loss"])
            assert len(losses["loss"]) == 200
            assert list(losses.df("pandas").columns)[-1] == "validation/loss"
            names = [name async for name in job.layers]
            assert names == ["scores"]
            assert {one.id async for one in client.jobs.list(limit=1)} >= {job.id}
            words = [
                {"name": "emb", "type": "Embedding", "args": {"embedding_dim": 4}},
                {"name": "sum", "type": "SequencePool", "args": {"mode": "sum"}},
                *SCORES,
            ]
            other = await client.train(words, (texts, Y[:60]), epochs=1)
            await asyncio.gather(other.wait(), job.refresh())
            async with client.stream([job, other]) as stream:
                ended = {event.job async for event in stream if event.type == "end"}
            assert ended == {job.id, other.id}

    asyncio.run(work())
