"""Modules and data as a user has them, through the real service and back."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

import glasshouse as gh
from glasshouse.client.modules.sample_batches import match
from tests.unit.client.own_modules import CASES, Case, Mlp, PackedLstm

NUM_ROWS, BATCH, STEPS, LR = 40, 8, 20, 0.05
OPTIONS: dict[str, Any] = {
    "steps": STEPS,
    "batch_size": BATCH,
    "optimizer": {"type": "SGD", "args": {"lr": LR}},
    "shuffle": {"enabled": False},
    "devices": {"type": "cpu", "threads": 1},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the jobs have it: sums are in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def without_chance(module: nn.Module) -> nn.Module:
    """The module with a dropout of nothing: what is drawn depends on what was drawn before."""
    for item in module.modules():
        for name in ("p", "dropout"):
            if isinstance(getattr(item, name, None), float):
                setattr(item, name, 0.0)
    return module


def rows_of(case: Case) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    data: dict[str, Any] = {}
    for name, field in case.fields.items():
        if field["type"] == "dense":
            data[name] = rng.normal(size=(NUM_ROWS, *field["shape"])).astype(np.float32)
        else:
            lengths = rng.integers(2, 7, NUM_ROWS)
            data[name] = [rng.integers(1, field["dim"], length) for length in lengths]
            data[name][0][0] = field["dim"] - 1
    data["y"] = rng.integers(0, 3, NUM_ROWS)
    return data


def batch_of(data: dict[str, Any], first: int) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    for name, column in data.items():
        part = column[first : first + BATCH]
        if isinstance(part, list):
            rows = [torch.from_numpy(row) for row in part]
            made[name] = pad_sequence(rows, batch_first=True)
            made[f"{name}.lengths"] = torch.tensor([len(row) for row in rows])
        else:
            made[name] = torch.from_numpy(part)
    return made


def by_hand(module: nn.Module, case: Case, data: dict[str, Any]) -> list[float]:
    """The losses of 20 steps of SGD, as torch's tutorials write them."""
    inputs = match(module, case.fields)
    learned = [item for item in module.parameters() if item.requires_grad]
    optimizer = torch.optim.SGD(learned, lr=LR)
    module.train()
    losses: list[float] = []
    for step in range(STEPS):
        batch = batch_of(data, step * BATCH % NUM_ROWS)
        optimizer.zero_grad()
        scores = module(**{name: batch[field] for name, field in inputs.items()})
        loss = nn.functional.cross_entropy(scores, batch["y"])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_gives_bit_for_bit_what_torch_gives_by_hand(client: gh.Client, case: Case):
    torch.manual_seed(11)
    module = without_chance(case.module())
    hand = copy.deepcopy(module)
    data = rows_of(case)
    job = client.train(module, data, **OPTIONS).wait(timeout=240)
    losses = by_hand(hand, case, data)
    assert job.metrics("loss").numpy().astype(np.float32).tolist() == losses
    trained = job.state_dict()
    expected = hand.state_dict()
    assert trained.keys() <= expected.keys()
    for name, item in trained.items():
        assert torch.equal(item, expected[name]), name

    job.load_into(module)
    assert all(torch.equal(item, expected[name]) for name, item in module.state_dict().items())
    inputs = match(module, case.fields)
    read = {name.partition(".")[0] for name in inputs.values()}
    found = client.infer(job, {name: data[name][:BATCH] for name in read})
    batch = batch_of(data, 0)
    module.eval()
    with torch.no_grad():
        mine = module(**{name: batch[field] for name, field in inputs.items()})
    np.testing.assert_allclose(next(iter(found.values())), mine.numpy(), rtol=1e-4, atol=1e-5)


def test_the_same_module_and_data_are_sent_once_and_its_weights_can_be_run(client: gh.Client):
    torch.manual_seed(2)
    module = without_chance(Mlp())
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(30, 6)).astype(np.float32), rng.integers(0, 3, 30)
    first, second = (client.train(module, (x, y), steps=2) for _ in range(2))
    specs = [job.spec() for job in (first, second)]
    assert specs[0]["init"] == specs[1]["init"]
    assert specs[0]["data"]["train"] == specs[1]["data"]["train"]
    sent = client.checkpoints.get(specs[0]["init"]["checkpoint"])
    assert (sent.name, sent.job) == ("Mlp", None)
    assert sent.state_dict().keys() == module.state_dict().keys()
    found = client.infer(sent, x[:4])
    module.eval()
    assert np.array_equal(found["heads_a"], module(torch.from_numpy(x[:4])).detach().numpy())
    other = Mlp()
    sent.load_into(other)
    assert all(
        torch.equal(item, module.state_dict()[name]) for name, item in other.state_dict().items()
    )
    with pytest.raises(ValueError, match="the module has no 'body"):
        sent.load_into(PackedLstm())
    for job in (first, second):
        job.wait(timeout=120)


class Reviews(Dataset[tuple[Tensor, int]]):
    """Rows of different lengths: a class is which of two words there is more of."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(number)
        word = number % 2
        length = 3 + number % 4
        return torch.where(
            torch.rand(length, generator=generator) < 0.8, 1 + word, 2 - word
        ).long(), word


def test_a_torch_dataset_of_ragged_rows_trains_and_infers(client: gh.Client):
    module = PackedLstm()
    module.fc = nn.Linear(20, 2)
    rows = Reviews()
    job = client.train(
        module,
        rows,
        validation=rows,
        epochs=6,
        batch_size=10,
        optimizer={"type": "Adam", "args": {"lr": 0.03}},
    ).wait(timeout=240)
    assert job.metrics("validation/accuracy").numpy()[-1] > 0.9
    found = client.infer(job, {"text": [rows[n][0] for n in range(60)]}, fields="id")
    assert np.mean(found["fc"] == [n % 2 for n in range(60)]) > 0.9


def test_a_data_frame_trains_a_module_on_its_numbers(client: gh.Client):
    rng = np.random.default_rng(5)
    a, b = rng.normal(size=(2, 80))
    frame = pa.table({"a": a, "b": b, "sign": np.where(a + b > 0, "plus", "minus")})
    module = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    job = client.train(
        module,
        frame,
        label="sign",
        epochs=20,
        optimizer={"type": "Adam", "args": {"lr": 0.05}},
        validation=0.2,
    ).wait(timeout=240)
    assert job.metrics("validation/accuracy").numpy()[-1] > 0.8
    assert client.infer(job, frame.slice(0, 3))["_2"].shape == (3, 2)


def test_a_refused_module_sends_no_weights(client: gh.Client):
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if x.sum() > 0 else x

    before = [item.id for item in client.checkpoints.list()]
    with pytest.raises(gh.CannotTrace) as refused:
        client.train(Branch(), (np.ones((4, 6), np.float32), np.array([0, 1, 2, 0])), steps=1)
    assert refused.value.file == __file__
    assert [item.id for item in client.checkpoints.list()] == before


def test_torchs_own_objects_train_bit_for_bit_as_they_do_by_hand(client: gh.Client):
    """A loss, an optimizer of two groups and a DataLoader, as a tutorial of torch has them."""
    torch.manual_seed(5)
    module = without_chance(Mlp())
    hand = copy.deepcopy(module)
    case = CASES["mlp"]
    data = rows_of(case)
    (name,) = (field for field in data if field != "y")
    rows = TensorDataset(torch.from_numpy(data[name]), torch.from_numpy(data["y"]))
    weight = torch.tensor([1.0, 2.0, 0.5])

    def parts(net: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
        heads = [item for key, item in net.named_parameters() if key.startswith("heads")]
        others = [item for key, item in net.named_parameters() if not key.startswith("heads")]
        groups = [{"params": others}, {"params": heads, "lr": LR / 2, "weight_decay": 0.125}]
        optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.75, 0.875), weight_decay=0.25)
        loss = nn.CrossEntropyLoss(weight, label_smoothing=0.25)
        return loss, optimizer, DataLoader(rows, batch_size=BATCH)

    loss, optimizer, loader = parts(module)
    job = client.train(
        module, loader, loss=loss, optimizer=optimizer, epochs=2, devices=OPTIONS["devices"]
    ).wait(timeout=240)

    loss, optimizer, loader = parts(hand)
    losses: list[float] = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            value = loss(hand(x), y)
            value.backward()
            optimizer.step()
            losses.append(value.item())
    assert job.metrics("loss").numpy().astype(np.float32).tolist() == losses
    expected = hand.state_dict()
    for key, item in job.state_dict().items():
        assert torch.equal(item, expected[key]), key
