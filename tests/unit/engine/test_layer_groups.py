"""The layers whose parameters processes gather together, and the messages that it takes."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from engine.network import layer_groups
from engine.network.fully_sharded import FullySharded
from engine.network.layer_groups import LayerGroups
from engine.network.network import Network
from glasshouse.spec import Graph

MIB = 2**20


def linear(mebibytes: float) -> nn.Module:
    """A layer with parameters of a size, which have no memory."""
    return nn.Linear(1, int(mebibytes * MIB / 4), bias=False, device="meta")


def grouped(*items: list[nn.Module] | nn.Module) -> LayerGroups:
    return layer_groups.layer_groups([x if isinstance(x, list) else [x] for x in items])


def test_groups_of_a_small_network_have_an_eighth_of_it():
    layers = [linear(1) for _ in range(16)]
    assert grouped(*layers).ends == [2, 4, 6, 8, 10, 12, 14, 16]


def test_groups_have_25_mib_where_an_eighth_is_more():
    found = grouped(*[linear(10) for _ in range(50)])
    assert found.ends == [*range(2, 51, 2)]
    assert found.sizes == [20 * MIB] * 25


def test_groups_of_a_large_network_have_a_32nd_of_it():
    assert grouped(*[linear(10) for _ in range(320)]).sizes == [100 * MIB] * 32


def test_a_larger_layer_and_what_is_computed_again_together_are_not_divided():
    layers = [linear(1) for _ in range(10)]
    assert grouped(*layers[:3], linear(30), *layers[3:6]).ends == [3, 4, 7]
    found = grouped(*layers[:2], [nn.ReLU(), *layers[2:6]], nn.ReLU(), *layers[6:])
    assert found.ends == [1, 2, 4, 5, 6, 7, 8]
    assert found.sizes == [MIB, MIB, 4 * MIB, *[MIB] * 4]


def test_blocks_and_shared_layers_are_apart_and_layers_of_other_types_are_kept():
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 8), 2, enable_nested_tensor=False
    )
    encoder.norm = nn.LayerNorm(8)
    shared, own = nn.Linear(8, 8), _Own()
    found = grouped(shared, own, encoder, shared)
    assert found.apart == [*encoder.layers, shared]
    assert found.kept == [own]
    assert found.sizes == [2 * 8 * 4]
    block = sum(item.nbytes for item in encoder.layers[0].parameters())
    assert found.gathered_bytes == 2 * (block + 3 * 4) + block


class _Own(nn.Module):
    """A layer of a type that is not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class _Messages(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def two_processes() -> Iterator[Any]:
    """The mesh of process 0 of two; messages arrive nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def chain(kept_at: tuple[str, ...] = ()) -> Network:
    """Sixteen layers in a row."""
    names = [f"a{number}" for number in range(16)]
    args = {"in_features": 8, "out_features": 8}
    layers = [
        {"name": name, "type": "Linear", "args": args, "inputs": [before]}
        for before, name in zip(["x", *names], names, strict=False)
    ]
    graph = Graph.model_validate_json(json.dumps({"layers": layers}))
    return Network(graph, names[-1:], kept_at=kept_at)


@pytest.mark.parametrize("kept_at", [(), ("a0", "a8", "a15")])
def test_a_group_takes_two_messages_for_parameters_and_one_for_gradients(kept_at, two_processes):
    network = chain(kept_at)
    sharded = FullySharded(network, network.plans, two_processes)
    network.shard(sharded)
    with _Messages() as seen:
        output = sharded.forward({"x": torch.ones(4, 8)}, is_last=True)["a15"]
        output.sum().backward()
    groups = 3 if kept_at else 8
    assert seen.counts == {"_allgather_base_": 2 * groups, "_reduce_scatter_base_": groups}
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_a_step_of_a_pipeline_gathers_once_and_sums_once(two_processes):
    """Also if a pass without gradients comes between, whose parameters may be others."""
    network = chain()
    sharded = FullySharded(network, network.plans, two_processes, is_staged=True)
    network.shard(sharded)
    batch = {"x": torch.ones(4, 8)}

    def messages(*, trains: bool) -> Counter[str]:
        with _Messages() as seen, torch.set_grad_enabled(trains):
            outputs = [network(batch)["a15"] for _ in range(3)]
            for number, output in enumerate(outputs if trains else ()):
                sharded.begin_backward(0, is_last=number == 2)
                output.sum().backward()
            sharded.free()
        return seen.counts

    for _ in range(2):
        assert messages(trains=True) == {"_allgather_base_": 8, "_reduce_scatter_base_": 8}
        assert messages(trains=False) == {"_allgather_base_": 8}
