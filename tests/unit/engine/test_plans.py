import copy
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from engine.process import planner
from engine.process.planner import answer
from glasshouse.spec import parse_job
from tests.unit.engine.runs import CNN, DIGITS_META, cnn, errors, planned, spec

MNIST_META = {
    "columns": [
        {"name": "image", "dtype": "uint8", "shape": [28, 28], "file": "0.npy"},
        {"name": "label", "dtype": "uint8", "shape": [], "file": "1.npy"},
    ],
    "splits": {"train": 60000, "test": 10000},
}


def mnist(**changes):
    conv = {"out_channels": 20, "kernel_size": 5, "padding": 2}
    layers = [
        {"name": "conv1", "type": "Conv2d", "args": conv},
        {"name": "relu1", "type": "ReLU"},
        {"name": "pool1", "type": "MaxPool2d", "args": {"kernel_size": 2}},
        {"name": "conv2", "type": "Conv2d", "args": conv},
        {"name": "relu2", "type": "ReLU"},
        {"name": "pool2", "type": "MaxPool2d", "args": {"kernel_size": 2}},
        {"name": "flat", "type": "Flatten"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]  # fmt: skip
    fields = {
        "image": {"type": "dense", "shape": [1, 28, 28]},
        "label": {"type": "integer", "dim": 10},
    }
    return spec(network={"layers": layers}, data={"fields": fields, "batch_size": 100}, **changes)


def test_the_mnist_network_has_the_numbers_that_torch_gives():
    plan = planned(mnist(), MNIST_META)
    by_hand = [nn.Conv2d(1, 20, 5), nn.Conv2d(20, 20, 5), nn.Linear(980, 10)]
    assert plan["parameters"] == sum(p.numel() for m in by_hand for p in m.parameters()) == 20350
    shapes = {item["name"]: item["output_shape"] for item in plan["layers"]}
    assert shapes["conv1"] == [20, 28, 28]
    assert shapes["pool2"] == [20, 7, 7]
    assert shapes["flat"] == [980]
    macs = 100 * (784 * 20 * 25 + 196 * 20 * 20 * 25 + 980 * 10)
    assert plan["flops"] == 2 * macs
    assert plan["num_steps"] == 1200
    memory = plan["memory"]
    assert memory["parameters_bytes"] == memory["gradients_bytes"] == 20350 * 4
    assert memory["optimizer_state_bytes"] == 20350 * 4  # momentum
    outputs = 100 * 4 * (2 * 15680 + 3920 + 2 * 3920 + 980 + 10)  # flat is a view of pool2
    # what the layers put out, and what comes and goes
    assert memory["activations_bytes"] == pytest.approx(outputs, rel=0.1)
    assert memory["data_bytes"] == 60000 * (784 + 8)
    heads = [value for name, value in memory.items() if name != "total_bytes"]
    assert memory["total_bytes"] == sum(heads)
    assert plan["warnings"] == []


@pytest.mark.parametrize(
    ("name", "args", "copies"),
    [("SGD", {}, 0), ("SGD", {"momentum": 0.9}, 1), ("Adam", {}, 2), ("ASGD", {}, 1)],
)
def test_optimizer_state_is_what_the_optimizer_keeps(name, args, copies):
    optimizer = {"type": name, "args": {"lr": 0.01, **args}}
    state = planned(mnist(optimizer=optimizer), MNIST_META)["memory"]["optimizer_state_bytes"]
    assert copies * 20350 * 4 <= state <= copies * 20350 * 4 + 6 * 64  # and step counters


def test_the_resolved_spec_is_complete_and_plans_to_itself():
    plan = planned(mnist(), MNIST_META)
    resolved = parse_job(json.dumps(plan["spec"]))
    assert all(layer.inputs for layer in resolved.network.layers)
    assert resolved.network.outputs == ("fc",)
    assert resolved.network.layers[7].args == {"in_features": 980, "out_features": 10}
    assert planned(plan["spec"], MNIST_META)["spec"] == plan["spec"]


def _layers(**changes):
    layers = copy.deepcopy(CNN)
    for name, change in changes.items():
        next(layer for layer in layers if layer["name"] == name).update(change)
    return {"network": {"layers": layers}}


def _loss(type_="CrossEntropyLoss", inputs=("fc", "label"), **args):
    return {"loss": {"type": type_, "inputs": list(inputs), "args": args}}


def _optimizer(type_="SGD", **args):
    return {"optimizer": {"type": type_, "args": args}}


def _probe(**probe):
    return {"probes": [{"every": 1, **probe}]}


def _data(**data):
    return {"data": data}


FIELDS = {"image": {"type": "dense"}, "label": {"type": "integer", "dim": 10}}

BAD = {
    "a layer that torch has not": (
        _layers(conv1={"type": "Conv9d"}), "/network/layers/0/type", "Conv9d"),
    "a layer spelled in small letters": (
        _layers(conv1={"type": "conv2d"}), "/network/layers/0/type", "did you mean Conv2d"),
    "a layer misspelled": (
        _layers(fc={"type": "Liner"}), "/network/layers/5/type", "did you mean Linear?"),
    "an argument misspelled, of a required one": (
        _layers(fc={"args": {"out_feature": 10}}),
        "/network/layers/5/args/out_feature", "did you mean out_features? It takes: in_features"),
    "a loss misspelled": (
        _loss("CrossEntropyLos"), "/loss/type", "did you mean CrossEntropyLoss?"),
    "an argument of a loss misspelled": (
        _loss(label_smooth=0.1), "/loss/args/label_smooth", "did you mean label_smoothing?"),
    "an optimizer in small letters": (
        _optimizer("adam"), "/optimizer/type", "did you mean Adam?"),
    "another word for the rate": (
        _optimizer("Adam", learning_rate=0.1), "/optimizer/args/learning_rate", "did you mean lr?"),
    "a scheduler misspelled": (
        {"scheduler": {"type": "StepLRR", "args": {"step_size": 3}}},
        "/scheduler/type", "did you mean StepLR?"),
    "an argument of a scheduler misspelled": (
        {"scheduler": {"type": "StepLR", "args": {"stepsize": 3}}},
        "/scheduler/args/stepsize", "did you mean step_size?"),
    "a metric misspelled, that would not be due either": (
        {"metrics": [{"type": "MulticlassF1Scor", "inputs": ["fc", "label"]}]},
        "/metrics/0/type", "did you mean MulticlassF1Score?"),
    "a container as a layer": (
        _layers(conv1={"type": "Sequential"}), "/network/layers/0/type", "container"),
    "an unknown argument": (
        _layers(fc={"args": {"out_features": 10, "colour": 1}}),
        "/network/layers/5/args/colour", "in_features, out_features, bias"),
    "a device as an argument": (
        _layers(fc={"args": {"out_features": 10, "device": "cuda"}}),
        "/network/layers/5/args/device", "no argument"),
    "an argument of the wrong type": (
        _layers(fc={"args": {"out_features": "ten"}}),
        "/network/layers/5/args/out_features", "integer"),
    "a boolean for an integer": (
        _layers(fc={"args": {"out_features": True}}),
        "/network/layers/5/args/out_features", "boolean"),
    "a missing argument": (
        _layers(conv1={"args": {"out_channels": 3}}),
        "/network/layers/0/args/kernel_size", "needs"),
    "arguments that contradict each other": (
        _layers(conv1={"args": {"out_channels": 3, "kernel_size": 3, "groups": 2}}),
        "/network/layers/0/args/groups", "divisible"),
    "a negative width": (
        _layers(fc={"args": {"out_features": -1}}),
        "/network/layers/5/args/out_features", "negative"),
    "a layer that does not fit its input": (
        _layers(fc={"args": {"in_features": 55, "out_features": 10}}),
        "/network/layers/5", "[64, 54]"),
    "a channel count that does not fit": (
        _layers(conv1={"args": {"in_channels": 3, "out_channels": 6, "kernel_size": 3}}),
        "/network/layers/0", "[batch, 3, height, width]"),
    "a reference to a later layer": (
        _layers(conv1={"inputs": ["fc"]}), "/network/layers/0/inputs/0", "later layer"),
    "a reference to itself": (
        _layers(conv1={"inputs": ["conv1"]}), "/network/layers/0/inputs/0", "itself"),
    "a dangling input": (
        _layers(pool1={"inputs": ["nowhere"]}), "/network/layers/2/inputs/0", "neither"),
    "a leaf that is not there": (
        _layers(pool1={"inputs": ["relu1.1"]}), "/network/layers/2/inputs/0", "it has relu1"),
    "too many layers inside one": (
        _layers(fc={"type": "MaxPool2d", "args": {"kernel_size": 10**17}}),
        "/network/layers/5/args/kernel_size", "too large"),
    "an output that is no layer": (
        {"network": {"layers": CNN, "outputs": ["nowhere"]}}, "/network/outputs/0", "nowhere"),
    "a loss that torch has not": (_loss("HappyLoss"), "/loss/type", "MSELoss"),
    "a loss of something unknown": (
        _loss(inputs=("nowhere", "label")), "/loss/inputs/0", "nowhere"),
    "a loss whose shapes differ": (_loss("MSELoss"), "/loss/inputs", "[64, 10]"),
    "a loss with too few inputs": (_loss(inputs=("fc",)), "/loss/inputs", "target"),
    "a loss that is not one number": (
        _loss(reduction="none"), "/loss/args/reduction", "mean or sum"),
    "a loss argument out of range": (
        _loss(label_smoothing=3.0), "/loss/args/label_smoothing", "between"),
    "class weights of the wrong length": (
        _loss(weight=[1, 2]), "/loss/args/weight", "10 classes"),
    "a loss that needs no network": (
        _loss("L1Loss", ("image", "image")), "/loss/inputs", "nothing to train"),
    "more classes than scores": (
        _data(fields={**FIELDS, "label": {"type": "integer", "dim": 11}}),
        "/loss/inputs/1", "11 classes"),
    "an optimizer that torch has not": (_optimizer("Magic"), "/optimizer/type", "Adam"),
    "an optimizer that needs a closure": (_optimizer("LBFGS"), "/optimizer/type", "closure"),
    "sparse Adam without sparse gradients": (_optimizer("SparseAdam"), "/optimizer", "dense"),
    "Muon for what is no matrix": (_optimizer("Muon"), "/optimizer", "2D"),
    "a negative learning rate": (_optimizer(lr=-1.0), "/optimizer/args/lr", "learning rate"),
    "an unknown optimizer argument": (
        _optimizer(speed=1), "/optimizer/args/speed", "momentum"),
    "a tuple that is too short": (
        _optimizer("Adam", betas=[0.9]), "/optimizer/args/betas", "Adam"),
    "an optimizer mode that cannot step": (
        _optimizer(lr=0.1, differentiable=True), "/optimizer", "leaf"),
    "a split that is not there": (
        _data(train={"dataset": "ds_1", "split": "dev"}), "/data/train/split", "train, test"),
    "a dataset that is not there": (
        _data(train={"dataset": "ds_2"}), "/data/train/dataset", "ds_2"),
    "a validation split that is not there": (
        _data(validation={"dataset": "ds_1", "split": "dev"}), "/data/validation/split", "dev"),
    "a fraction without rows": (
        _data(train={"dataset": "ds_1", "split": "train", "fraction": [0, 0.001]}),
        "/data/train", "no rows"),
    "a column that is not there": (
        _data(fields={**FIELDS, "image": {"type": "dense", "column": "photo"}}),
        "/data/fields/image/column", "image, label"),
    "a shape that the column has not": (
        _data(fields={**FIELDS, "image": {"type": "dense", "shape": [1, 28, 28]}}),
        "/data/fields/image/shape", "[1, 8, 8]"),
    "no batch left": (
        _data(drop_last=True, batch_size=1000), "/data/drop_last", "300"),
    "an unknown field of the spec": ({"colour": 1}, "/colour", "no such field"),
    "a wrong type inside a field": (
        _data(fields={**FIELDS, "label": {"type": "integer", "dim": True}}),
        "/data/fields/label/dim", "whole number"),
    "a metric of the wrong shape": (
        {"metrics": [{"type": "accuracy", "inputs": ["pool1", "label"]}]},
        "/metrics/0/inputs", "[64, 6, 3, 3]"),
    "more in the best than there are": (
        {"metrics": [{"type": "accuracy", "inputs": ["fc", "label"], "top_k": 11}]},
        "/metrics/0/top_k", "10 classes"),
    "the same metric twice": (
        {"metrics": [{"type": "accuracy", "inputs": ["fc", "label"]}] * 2}, "/metrics", "same"),
    "a probe that matches nothing": (
        _probe(layers=["fc", "zz*"], kinds=["output"]), "/probes/0/layers/1", "zz*"),
    "a probe for parameters that are not there": (
        _probe(layers=["relu1"], kinds=["output", "param"]), "/probes/0/kinds/1", "no param"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_spec_is_refused_with_the_place_and_the_reason(case):
    changes, pointer, words = BAD[case]
    found = errors(spec(**changes))
    assert pointer in found, found
    assert words in found[pointer]


def test_several_problems_of_the_data_are_reported_at_once():
    fields = {"image": {"type": "dense", "column": "x"}, "label": {"type": "dense", "column": "y"}}
    found = errors(spec(data={"fields": fields}))
    assert set(found) == {"/data/fields/image/column", "/data/fields/label/column"}


def test_a_text_column_cannot_be_dense():
    meta = copy.deepcopy(DIGITS_META)
    meta["columns"][0]["dtype"] = "string"
    assert "holds text" in errors(spec(), meta)["/data/fields/image"]


def test_rows_of_validation_are_evaluated_on_unless_evaluate_is_null():
    rows = {"validation": {"dataset": "ds_1", "split": "test"}}
    left_out = planned(spec(data=rows))
    assert left_out["spec"]["evaluate"] == {"every_epochs": 1, "every_steps": None, "samples": 0}
    assert left_out["warnings"] == []
    never = planned(spec(data=rows, evaluate=None))
    assert never["spec"]["evaluate"] is None
    assert {item["pointer"]: item["code"] for item in never["warnings"]} == {
        "/data/validation": "unused_validation"
    }
    assert planned(spec())["spec"]["evaluate"] is None


def test_unused_layers_and_fields_give_a_warning():
    layers = [*copy.deepcopy(CNN)]
    layers.insert(5, {"name": "side", "type": "Linear", "args": {"out_features": 2}})
    layers[6]["inputs"] = ["drop"]
    fields = {**FIELDS, "spare": {"type": "dense", "column": "image"}}
    probe = {"layers": ["side", "fc"], "kinds": ["output_grad", "param_grad"], "every": 1}
    plan = planned(spec(network={"layers": layers}, data={"fields": fields}, probes=[probe]))
    found = {item["pointer"]: item["code"] for item in plan["warnings"]}
    assert found == {
        "/data/fields/spare": "unused_field",
        "/network/layers/5": "unused_layer",
        "/probes/0/kinds/0": "no_gradient",
        "/probes/0/kinds/1": "no_gradient",
    }
    assert plan["probes"][0]["matched"] == ["fc", "fc.weight", "fc.bias"]


def test_a_probe_that_would_see_no_gradient_is_refused():
    layers = [*copy.deepcopy(CNN), {"name": "side", "type": "Softmax", "args": {"dim": 1}}]
    network = {"layers": layers, "outputs": ["fc"]}
    probe = {"layers": ["side"], "kinds": ["output_grad"], "every": 1}
    assert "no gradient" in errors(spec(network=network, probes=[probe]))["/probes/0/kinds/0"]


def test_whole_tensors_above_the_limit_are_refused():
    layers = _layers(conv1={"args": {"out_channels": 40000, "kernel_size": 3}})
    probe = {"layers": ["conv1"], "kinds": ["output"], "every": 1, "want": ["full"]}
    assert "limit" in errors(spec(**layers, probes=[probe]))["/probes/0/want"]


def test_an_embedding_smaller_than_its_field_is_refused():
    column = {"name": "w", "dtype": "int64", "shape": [], "file": "0.npy"}
    meta = {"columns": [column], "splits": {"all": 9}}
    args = {"num_embeddings": 5, "embedding_dim": 7}
    job = spec(
        network={"layers": [{"name": "emb", "type": "Embedding", "args": args}]},
        loss={"type": "CrossEntropyLoss", "inputs": ["emb", "w"]},
        data={"train": {"dataset": "ds_1"}, "fields": {"w": {"type": "integer", "dim": 7}}},
    )
    assert "values up to 6" in errors(job, meta)["/network/layers/0/args/num_embeddings"]


def test_a_loss_without_a_meta_kernel_is_tried_on_a_tiny_batch():
    meta = {
        "columns": [
            {"name": "x", "dtype": "float32", "shape": [12, 5], "file": "0.npy"},
            {"name": "n", "dtype": "int64", "shape": [], "file": "1.npy"},
        ],
        "splits": {"all": 50},
    }
    layers = [
        {"name": "fc", "type": "Linear", "args": {"out_features": 4}},
        {"name": "by_time", "type": "permute", "args": {"dims": [1, 0, 2]}},
        {"name": "score", "type": "LogSoftmax", "args": {"dim": 2}},
    ]
    fields = {"x": {"type": "dense"}, "n": {"type": "integer", "dim": 4}}
    data = {"train": {"dataset": "ds_1"}, "fields": fields}
    job = spec(
        network={"layers": layers}, loss={"type": "CTCLoss", "inputs": ["score", "n"]}, data=data
    )
    assert "target_lengths" in errors(job, meta)["/loss/inputs"]


def test_a_layer_with_a_name_that_is_taken_is_pointed_at():
    def refused(*changes: tuple[int, dict[str, Any]], **more: Any) -> dict[str, str]:
        whole = spec(**more)
        for number, change in changes:
            whole["network"]["layers"][number] |= change
        return errors(whole)

    assert list(refused((3, {"name": "conv1"}))) == ["/network/layers/3"]
    assert "rename" in refused((3, {"name": "conv1"}))["/network/layers/3"]
    of_field = refused((1, {"name": "image"}))
    assert list(of_field) == ["/network/layers/1"]
    assert "a layer and a data field" in of_field["/network/layers/1"]
    shared = refused((5, {"shared_with": "conv9"}))
    assert list(shared) == ["/network/layers/5/shared_with"]
    other = refused((5, {"shared_with": "conv1"}))
    assert list(other) == ["/network/layers/5"]


@pytest.mark.long
def test_the_planner_outlives_what_it_is_asked():
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.process.planner", "--max-seconds", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    with process:

        def ask(request):
            text = request if isinstance(request, str) else json.dumps(request) + "\n"
            process.stdin.write(text)
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        assert json.loads(process.stdout.readline())["torch"] == torch.__version__.partition("+")[0]
        wide = _layers(fc={"args": {"out_features": 10**12}})
        endless = {"d_model": 2, "nhead": 1, "num_encoder_layers": 10**7}
        deep = _layers(fc={"type": "Transformer", "args": endless})
        metas = {"ds_1": DIGITS_META}
        assert ask("nonsense\n")["ok"] is False
        for number, job in enumerate([spec(**wide), spec(**deep), {"kind": "train"}, {}, 7]):
            reply = ask({"id": number, "do": "plan", "spec": job, "datasets": metas})
            assert reply["id"] == number
        assert ask({"id": 9, "do": "catalog", "section": "nowhere"})["ok"] is False
        assert ask({"id": 10, "do": "plan", "spec": spec(), "datasets": metas})["ok"] is True
        process.stdin.close()
        assert process.wait(timeout=60) == 0


PLANNER = """
import sys, time
from engine.process import planner

def plan(request):
    if request["spec"] == "wait":
        time.sleep(1.5)
        return {}
    while True:
        sum(range(1000))

planner.warm_up()
planner._plan = plan
sys.argv = ["planner", "--max-seconds", "0.5"]
planner.main()
"""


@pytest.mark.long
def test_only_the_time_of_the_processor_is_limited_and_the_kernel_ends_what_takes_more():
    """On a machine that is busy with others a plan takes long, and is no larger."""
    process = subprocess.Popen(
        [sys.executable, "-c", PLANNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    with process:
        assert json.loads(process.stdout.readline())["ready"]
        for body in ("wait", "work", "wait"):
            process.stdin.write(json.dumps({"id": 1, "do": "plan", "spec": body}) + "\n")
            process.stdin.flush()
            reply = json.loads(process.stdout.readline())
            assert reply["ok"] == (body == "wait"), reply
            assert reply.get("overtime", False) == (body == "work")
        process.stdin.close()
        assert process.wait(timeout=60) == 0


def test_a_planner_child_that_dies_gives_an_error_response(monkeypatch):
    """As where the kernel ends it for memory: the planner itself continues."""
    monkeypatch.setattr(planner, "answer", lambda _: os.kill(os.getpid(), signal.SIGKILL))
    reply = planner.answer_in_child({"id": 3, "do": "plan"}, 10.0)
    assert (reply["id"], reply["ok"], reply["errors"][0]["code"]) == (3, False, "unchecked")


MANY = """
import os, random, signal, sys, time
from engine.process.planner import answer, time_limit, warm_up
from tests.unit.engine.runs import DIGITS_META, spec

warm_up()
chance, ends = random.Random(int(sys.argv[1])), {}


def request(number):
    layers = [{"name": "flat", "type": "Flatten"}]
    layers += [
        {"name": f"l{i}", "type": "Linear", "args": {"out_features": 16 + number}}
        for i in range(20)
    ]
    loss = {"type": "CrossEntropyLoss", "inputs": ["l19", "label"]}
    job = spec(network={"layers": layers}, loss=loss, seed=number)
    return {"id": number, "do": "plan", "spec": job, "datasets": {"ds_1": DIGITS_META}}


def end_of(run):
    pid = os.fork()
    if not pid:
        os._exit(run())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def hundredths():
    began = time.process_time()
    answer(request(200))
    return min(255, 1 + int(100 * (time.process_time() - began)))


def limited(number, seconds):
    with time_limit(seconds):
        return 0 if answer(request(number))["ok"] else 1


needed = end_of(hundredths) / 100
for number in range(int(sys.argv[2])):
    seconds = chance.uniform(0.02, 2) * needed
    end = end_of(lambda: limited(number, seconds))
    ends[end] = ends.get(end, 0) + 1
print(ends.pop(0, 0), ends.pop(-signal.SIGPROF, 0), ends)
"""


@pytest.mark.long
def test_wherever_a_plan_is_when_its_time_is_over_nothing_but_the_limit_ends_it():
    """With limits from almost nothing to twice of what a plan needs here."""
    many = int(os.environ.get("PLANS", "20"))
    done = subprocess.run(
        [sys.executable, "-c", MANY, os.environ.get("SEED", "1"), str(many)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    good, ended, others = done.stdout.split(maxsplit=2)
    assert others.strip() == "{}"
    assert int(good) + int(ended) == many
    assert min(int(good), int(ended)) > 0


def test_the_catalog_describes_what_can_be_used():
    from jsonschema import Draft202012Validator

    sections = ("layers", "presets", "losses", "optimizers", "schedulers", "metrics", "datasets")
    for section in sections:
        entries = answer({"id": 1, "do": "catalog", "section": section})["entries"]
        assert entries
        for entry in entries:
            Draft202012Validator.check_schema(entry["schema"])
            assert entry["summary"]
            assert entry["schema"]["required"] == [
                name
                for name in entry["schema"]["required"]
                if name in entry["schema"]["properties"]
            ]
    assert answer({"id": 1, "do": "catalog", "section": "rules"})["entries"] == []


def test_a_limit_on_sequences_needs_one():
    found = errors(spec(data={"sequence": {"max_length": 6}}))
    assert "no field is a sequence" in found["/data/sequence/max_length"]


def test_a_good_plan_builds_the_network_that_torch_builds():
    from engine.network.network import Network

    resolved = parse_job(json.dumps(planned(spec())["spec"]))
    torch.manual_seed(5)
    ours = Network(resolved.network, ("fc",))
    torch.manual_seed(5)
    theirs = cnn()
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )
