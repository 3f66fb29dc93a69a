"""A hand-written DistributedDataParallel loop for torchrun, for `bench.training.parallel`.

It trains the network of that benchmark on the same rows, reports the loss of each step over all
processes as a job does, and prints the seconds of a step.
"""

import argparse
import json
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.training.parallel import BATCH, WARM_UP, network_by_hand, rows


def main() -> None:
    """Train, and print the seconds of a step in process 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", required=True)
    parser.add_argument("--steps", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels = (torch.from_numpy(item) for item in rows())
    torch.manual_seed(0)
    network = DistributedDataParallel(network_by_hand(given.network), gradient_as_bucket_view=True)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    share = BATCH // size
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    began = 0.0
    for step in range(given.steps):
        if step == WARM_UP:
            began = time.perf_counter()
        start = (step * BATCH + rank * share) % (len(labels) - BATCH)
        taken = order[start : start + share]
        scores = network(images[taken].float() / 255)
        loss = criterion(scores, labels[taken])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach() / size
        dist.all_reduce(mean)
        mean.item()
    if rank == 0:
        found = {"step_s": (time.perf_counter() - began) / (given.steps - WARM_UP)}
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # torch 2.13 aborts now and then when the interpreter ends after gloo was used


if __name__ == "__main__":
    main()
