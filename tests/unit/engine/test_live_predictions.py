"""Predictions with the current weights of a job: as of its checkpoint, and training unchanged."""

import json
from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from engine.guards.guard import Guard
from engine.process import rank
from engine.serving import live_predictions, requests, responses
from engine.serving.live_predictions import LivePredictions
from engine.serving.served_models import ServedVersion, VersionName
from engine.training.failures import StepFailed
from engine.training.report import Outputs
from glasshouse import frames
from glasshouse.frames import Frame, Kind
from glasshouse.spec import Parallel, parse_trained
from tests.integration.serving.test_peers import Peer
from tests.unit.engine.parallel_jobs import series
from tests.unit.engine.runs import captured, of_type, planned, spec, write_job
from tests.waiting import until

STEPS = 8
LAYERS = [
    {"name": "conv", "type": "Conv2d", "args": {"out_channels": 8, "kernel_size": 3}},
    {"name": "norm", "type": "BatchNorm2d"},
    {"name": "relu", "type": "ReLU", "args": {"inplace": True}},
    {"name": "flat", "type": "Flatten"},
    {"name": "drop", "type": "Dropout", "args": {"p": 0.5}},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]
AUGMENT = [{"type": "RandomHorizontalFlip"}, {"type": "RandomCrop", "args": {"padding": 1}}]
ROWS = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def job(**more: Any) -> dict[str, Any]:
    """A network whose training depends on its buffers and on every random generator."""
    image = {"type": "dense", "augment": AUGMENT}
    return spec(
        network={"layers": LAYERS},
        data={
            "fields": {"image": image, "label": {"type": "integer", "dim": 10}},
            "validation": {"dataset": "ds_1", "split": "test"},
            "normalize": {"image": {"type": "standard"}},
        },
        evaluate={"every_steps": 3},
        stop={"steps": STEPS},
        probes=[{"layers": ["norm", "fc"], "kinds": ["output", "output_grad"], "every": 2}],
        checkpoint={"every_steps": 1, "every_s": None, "keep_last": 99},
        **more,
    )


@pytest.fixture(autouse=True)
def settings_as_before() -> Generator[None]:
    yield
    torch.use_deterministic_algorithms(mode=False)
    torch.set_float32_matmul_precision("highest")


class Client:
    """Reads the records of a job, and asks for predictions at each boundary, if ``listens``."""

    cancel_requested, ends_as, wanted, threads, models = False, "cancelled", None, None, None

    def __init__(self, directory: Path, *, listens: bool) -> None:
        self.orders: deque[dict[str, Any]] = deque()
        self.seen: list[dict[str, Any]] = []
        self.answers: dict[int, Frame] = {}
        self._asked = {"job": "job_x", "at": {"path": str(directory / "s")}} if listens else None
        self._made: LivePredictions | None = None
        self._peer: Peer | None = None
        self._num_sent = 0

    def make(self, *given: Any) -> LivePredictions:
        """Create what answers, and keep it."""
        self._made = LivePredictions(*given)
        return self._made

    @property
    def listen(self) -> dict[str, Any] | None:
        """Where to listen. Sends a request and waits until it is queued, once there is a socket."""
        if self._asked is not None and (peer := self._connected()) is not None:
            self._num_sent += 1
            peer.send(request(self._num_sent, ROWS))
            assert self._made is not None
            waiting = self._made._requests  # pyright: ignore[reportPrivateUsage]
            num = 1 if live_predictions.MAX_CREDIT_S else self._num_sent  # else none is answered
            until(lambda: len(waiting) == num, longest_pause_s=0.001)
        return self._asked

    def _connected(self) -> Peer | None:
        found = of_type(self.seen, "answering")
        if self._peer is None and found:
            assert "problem" not in found[0], found
            self._peer = Peer(found[0]["address"])
            self._peer.greet(found[0]["token"])
            proof = self._peer.read()
            assert proof is not None
            assert proof.kind is Kind.PROOF
        return self._peer

    def close(self) -> None:
        """Take the answers that arrived."""
        if self._peer is None:
            return
        while (frame := self._peer.read()) is not None:
            if frame.kind is Kind.ANSWER:
                self.answers[frame.number] = frame
        self._peer.socket.close()


def request(number: int, rows: Tensor, **head: Any) -> bytes:
    whole = {"reference": "job_x", "protocol": "predict", "content_type": "application/json"}
    body = {"inputs": {"image": rows.tolist()}, "outputs": ["norm", "fc"], "fields": ["value"]}
    parts = frames.pack_parts(Kind.REQUEST, number, whole | head, json.dumps(body).encode())
    return b"".join(map(bytes, parts))


def train(
    directory: Path,
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    listens: bool,
    credit_s: float = 1000.0,
    **more: Any,
) -> Client:
    """Run the job in this process. ``credit_s``: answers may take so long, and no share of time."""
    monkeypatch.setattr(live_predictions, "MAX_CREDIT_S", credit_s)
    meta = json.loads((table / "meta.json").read_text())
    resolved = planned(job(**more), meta)["spec"]
    assignment = rank.Assignment.read(write_job(directory, resolved, table) / "job.json")
    client = Client(directory, listens=listens)
    monkeypatch.setattr(rank, "LivePredictions", client.make)
    out = Outputs(directory, client.seen.append)
    ended = rank.run(assignment, control=client, out=out)
    client.close()
    assert ended.state == "succeeded"
    return client


def checkpoints(client: Client, directory: Path) -> dict[int, Path]:
    return {one["step"]: directory / one["dir"] for one in of_type(client.seen, "checkpoint")}


def state_of(directory: Path) -> dict[str, Any]:
    """Everything in a checkpoint except times."""
    found: dict[str, Any] = {path.stem: load_file(path) for path in directory.glob("*.safetensors")}
    return found


CASES = [
    {},
    {"average": {"type": "ema", "decay": 0.9}},
    {"average": {"type": "window"}, "optimizer": {"type": "Adam"}},
    {"precision": "bfloat16", "deterministic": True, "memory_format": "channels_last"},
    {"matmul_precision": "medium", "accumulate": 2},
]


@pytest.mark.parametrize("more", CASES, ids=lambda more: "-".join(more) or "plain")
def test_training_is_bit_for_bit_the_same_and_answers_are_those_of_the_checkpoint(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
):
    alone = train(tmp_path / "a", digits, monkeypatch, listens=False, **more)
    asked = train(tmp_path / "b", digits, monkeypatch, listens=True, **more)
    assert not of_type(alone.seen, "answering")

    assert series(asked.seen) == series(alone.seen)
    mine, others = (of_type(client.seen, "stats") for client in (asked, alone))
    assert [(one["step"], one["rows"]) for one in mine] == [
        (one["step"], one["rows"]) for one in others
    ]
    own = captured(asked.seen, tmp_path / "b")
    for key, tensor in captured(alone.seen, tmp_path / "a").items():
        assert torch.equal(own.pop(key), tensor), key
    assert not own
    saved, before = checkpoints(asked, tmp_path / "b"), checkpoints(alone, tmp_path / "a")
    assert saved.keys() == before.keys()
    for step, directory in saved.items():
        found, wanted = state_of(directory), state_of(before[step])
        assert found.keys() == wanted.keys()
        for part, tensors in wanted.items():
            for name, tensor in tensors.items():
                assert torch.equal(found[part][name], tensor), (step, part, name)

    steps = [json.loads(frame.body)["step"] for frame in asked.answers.values()]
    assert steps == [*range(1, STEPS + 1)], "one request at each boundary, and one at the end"
    answers = {json.loads(frame.body)["step"]: frame for frame in asked.answers.values()}
    trained_by = parse_trained(json.dumps(planned(job(**more), _meta(digits))["spec"]))
    assert trained_by is not None
    for step in answers.keys() & saved.keys():
        name = VersionName("m", 1, "ckpt_1", saved[step])
        version = ServedVersion(name, trained_by, torch.device("cpu"), 64)
        served = answer_of(version)
        head, document = answers[step].head, json.loads(answers[step].body)
        assert (head["status"], head["job"], head["step"]) == (200, "job_x", step)
        assert document["outputs"] == served["outputs"], step
        assert document["job"] == "job_x"
        assert "model" not in document
        assert_close_by_hand(saved[step], document["outputs"])


def _meta(table: Path) -> dict[str, Any]:
    return json.loads((table / "meta.json").read_text())


@torch.inference_mode()
def answer_of(version: ServedVersion) -> dict[str, Any]:
    """What a replica of a checkpoint answers."""
    torch.use_deterministic_algorithms(mode=False)
    torch.set_float32_matmul_precision("highest")
    head, body = frames_of(request(1, ROWS))
    asked = requests.read(head, body, version.inputs)
    (columns,) = version.compute([asked])
    return json.loads(responses.write(asked, columns, version.inputs, version.origin)[1])


def frames_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    (frame,) = frames.FrameReader(1 << 20).feed(data)
    return frame.head, bytes(frame.body)


@torch.no_grad()
def assert_close_by_hand(checkpoint: Path, outputs: dict[str, Any]) -> None:
    """Compare with torch."""
    names = {"conv": "0", "norm": "1", "fc": "5"}
    saved = load_file(checkpoint / "model.safetensors")
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(288, 10),
    ).eval()
    network.load_state_dict(
        {
            f"{names[name.partition('.')[0]]}.{name.partition('.')[2]}": x
            for name, x in saved.items()
        }
    )
    learned = load_file(checkpoint / "data.safetensors")
    shift, divisor = learned["image.shift"].float(), learned["image.divisor"].float()
    x = (ROWS - shift) / divisor
    for name, depth in (("norm", 2), ("fc", 6)):
        found = torch.tensor(outputs[f"{name}/value"])
        torch.testing.assert_close(found, network[:depth](x), rtol=1e-4, atol=1e-5)


def test_requests_wait_while_answers_have_taken_their_share_of_the_time(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without any time for answers, they are given when training has ended."""
    client = train(tmp_path, digits, monkeypatch, listens=True, credit_s=0.0)
    steps = [json.loads(frame.body)["step"] for frame in client.answers.values()]
    assert steps == [STEPS] * STEPS


def test_the_time_of_answers_is_a_part_of_the_step(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = {}
    for name, listens in (("a", False), ("b", True)):
        client = train(tmp_path / name, digits, monkeypatch, listens=listens)
        found[name] = [one["values"] for one in of_type(client.seen, "metrics")]
    assert not any("time/predict" in values for values in found["a"])
    assert any(0 < values.get("time/predict", 0) <= values["time/step"] for values in found["b"])


def test_a_request_on_which_the_network_fails_fails_alone(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    real = live_predictions.LiveNetwork.compute

    def fail_once(self: live_predictions.LiveNetwork, asked: Any) -> Any:
        if self.step == 3:
            raise RuntimeError("no kernel for this")
        return real(self, asked)

    monkeypatch.setattr(live_predictions.LiveNetwork, "compute", fail_once)
    client = train(tmp_path, digits, monkeypatch, listens=True)
    heads = [frame.head for frame in client.answers.values()]
    assert [head["status"] for head in heads] == [200, 200, 500, *[200] * (STEPS - 3)]
    assert heads[2]["code"] == "prediction_failed"
    assert "no kernel for this" in heads[2]["detail"]
    assert "no kernel for this" in capfd.readouterr().err


def test_a_job_without_memory_for_a_second_network_reports_that_and_trains_on(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(_device: torch.device, _weights: object) -> None:
        raise MemoryError("a copy of the weights needs 9 MiB of the device")

    monkeypatch.setattr(live_predictions, "_check_memory", full)
    meta = _meta(digits)
    assignment = rank.Assignment.read(
        write_job(tmp_path, planned(job(), meta)["spec"], digits) / "job.json"
    )
    client = Client(tmp_path, listens=False)
    client._asked = {"job": "job_x", "at": {"path": str(tmp_path / "s")}}  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(Client, "_connected", lambda _self: None)
    ended = rank.run(assignment, control=client, out=Outputs(tmp_path, client.seen.append))
    assert ended.state == "succeeded"
    (found,) = of_type(client.seen, "answering")
    assert found["address"] == ""
    assert "9 MiB" in found["problem"]


def test_what_waits_when_a_job_fails_is_refused(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also of what had no time yet."""

    def fail(_self: object, step: int, *_: object) -> None:
        if step == 3:
            raise RuntimeError("the step failed")

    monkeypatch.setattr(live_predictions, "MAX_CREDIT_S", 0.0)
    monkeypatch.setattr(Guard, "check", fail)
    resolved = planned(job(), _meta(digits))["spec"]
    assignment = rank.Assignment.read(write_job(tmp_path, resolved, digits) / "job.json")
    client = Client(tmp_path, listens=True)
    monkeypatch.setattr(rank, "LivePredictions", client.make)
    with pytest.raises(StepFailed):
        rank.run(assignment, control=client, out=Outputs(tmp_path, client.seen.append))
    client.close()
    assert client.answers
    codes = {(frame.head["status"], frame.head["code"]) for frame in client.answers.values()}
    assert codes == {(503, "replica_closing")}


def test_a_network_in_parts_cannot_predict():
    parallel: list[tuple[dict[str, Any], str | None]] = [
        ({"strategy": "none"}, None),
        ({"strategy": "data", "processes": 4}, None),
        ({"strategy": "fsdp", "processes": 2}, "with fsdp"),
        ({"data": 2, "pipeline": 2}, "with pipeline"),
        ({"fsdp": 2, "tensor": 2}, "with fsdp and tensor"),
        ({"strategy": "placed"}, "several devices"),
    ]
    for given, why in parallel:
        found = Parallel.model_validate(given).why_no_predictions
        assert (found is None) if why is None else (why in str(found)), given
