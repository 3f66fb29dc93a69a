"""What a pool draws, for the engine's tests."""

from engine.data.batches.shuffle_pool import Pool, PoolDraws


def drawn(pool: Pool, seed: int = 3, epoch: int = 0, skip: int = 0) -> list[list[int]]:
    """The rows of the batches of an epoch, by their places."""
    draws = PoolDraws(pool, seed, epoch)
    draws.skip(skip)
    num = -(-pool.num_rows // pool.batch_size) - skip
    return [draws.draw().places.tolist() for _ in range(num)]
