"""Bandwidths of messages, as NVIDIA's NCCL Tests define them.

The *algorithm bandwidth* is the size divided by the time. The *bus bandwidth* is what each link
carries: the algorithm bandwidth multiplied by a factor of the operation and the number of processes
n, so that it can be compared with the hardware's and between numbers of processes. The factors are
those of https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md:

- all-reduce: 2 (n - 1) / n
- all-gather: (n - 1) / n
- broadcast and point-to-point: 1

The size of an all-gather is that of its result, the values of all processes.
"""

ALL_REDUCE, ALL_GATHER, BROADCAST, SEND_RECV = "all_reduce", "all_gather", "broadcast", "send_recv"


def bus_factor(op: str, processes: int) -> float:
    """Return the bus bandwidth divided by the algorithm bandwidth.

    Raises:
        KeyError: the operation is not known.
    """
    passed_on = (processes - 1) / processes
    return {ALL_REDUCE: 2 * passed_on, ALL_GATHER: passed_on, BROADCAST: 1.0, SEND_RECV: 1.0}[op]


def bandwidths(op: str, size_bytes: int, time_s: float, processes: int) -> tuple[float, float]:
    """Return the algorithm and the bus bandwidth in bytes per second."""
    algorithm = size_bytes / time_s
    return algorithm, algorithm * bus_factor(op, processes)
