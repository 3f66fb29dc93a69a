"""Networks by name: against their papers' numbers, against torch by hand, and trained."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from engine.network.network import Network
from engine.optim.parameter_options import fill
from engine.plan import catalog
from engine.plan.plan import parse_spec
from engine.process.planner import answer
from glasshouse.spec import presets
from glasshouse.spec.presets import PRESETS, Preset
from tests.unit.engine.ragged import TEXTS, meta_of, write_ragged
from tests.unit.engine.runs import (
    captured,
    errors,
    losses,
    of_type,
    planned,
    run,
    spec,
    write_table,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's, once


def preset(name: str, **args: Any) -> dict[str, Any]:
    return {"type": "preset", "preset": name, "args": args}


def column(name: str, shape: list[int], dtype: str = "float32") -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": shape, "file": "0.npy"}


def images(*shape: int, classes: int, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A job on pictures of a shape, and the description of their dataset."""
    fields = {"image": {"type": "dense"}, "label": {"type": "integer", "dim": classes}}
    columns = [column("image", [*shape], "uint8"), column("label", [], "int64")]
    job = spec(data={"train": {"dataset": "ds_1"}, "fields": fields}, **changes)
    return job, {"columns": columns, "splits": {"all": 100}}


# --- numbers of parameters -------------------------------------------------------------------


def test_mnist_cnn_has_the_parameters_of_the_notes():
    job, meta = images(1, 28, 28, classes=10, network=preset("mnist_cnn"))
    plan = planned(job, meta)
    assert plan["parameters"] == 20_350
    assert [layer["output_shape"] for layer in plan["layers"]][-2:] == [[980], [10]]


def test_resnet18_has_torchvisions_parameters_and_names():
    job, meta = images(3, 224, 224, classes=1000, network=preset("resnet18"))
    plan = planned(job, meta)
    assert plan["parameters"] == 11_689_512
    names = {name for layer in plan["layers"] for name in layer["parameter_names"]}
    known = {"conv1.weight", "bn1.bias", "layer1_0_conv1.weight", "layer4_1_bn2.weight"}
    known |= {"layer2_0_downsample_0.weight", "layer2_0_downsample_1.bias", "fc.bias"}
    assert known <= names
    assert len(names) == 62
    shapes = {layer["name"]: layer["output_shape"] for layer in plan["layers"]}
    assert shapes["maxpool"] == [64, 56, 56]
    assert shapes["layer4_1_relu"] == [512, 7, 7]


def test_transformer_lm_has_gpt_2s_parameters():
    tokens = {"type": "integer_sequence", "dim": 50257}
    sizes = {"num_tokens": 50257, "block_size": 1024, "num_layers": 12, "num_heads": 12}
    job = spec(
        network=preset("transformer_lm", **sizes, width=768),
        loss={"type": "CrossEntropyLoss", "inputs": ["scores", "next"]},
        data={
            "train": {"dataset": "ds_1"},
            "fields": {"tokens": tokens, "next": tokens},
            "batch_size": 2,
        },
    )
    columns = [column(name, [1024], "int64") for name in ("tokens", "next")]
    plan = planned(job, {"columns": columns, "splits": {"all": 10}})
    assert plan["parameters"] == 124_439_808


def test_cbow_has_an_embedding_and_a_layer_of_scores():
    job, meta = images(4, classes=3000, network=preset("cbow", context="image"))
    job["data"]["fields"]["image"] = {"type": "integer_sequence", "dim": 3000}
    meta["columns"][0]["dtype"] = "int64"
    plan = planned(job, meta)
    assert plan["parameters"] == 3000 * 256 + 256 * 3000 + 3000


# --- against torch by hand -------------------------------------------------------------------


def built(job: dict[str, Any], meta: dict[str, Any], *wanted: str) -> Network:
    torch.manual_seed(0)
    return Network(parse_spec(planned(job, meta)["spec"]).network, wanted)


def test_a_block_of_the_language_model_is_torchs_encoder_layer():
    """Pre-norm with GELU: torch's fused layer with the same weights gives the same."""
    tokens = {"type": "integer_sequence", "dim": 11}
    job = spec(
        network=preset(
            "transformer_lm", num_tokens=11, block_size=6, num_layers=1, num_heads=2, width=8
        ),
        loss={"type": "CrossEntropyLoss", "inputs": ["scores", "next"]},
        data={"train": {"dataset": "ds_1"}, "fields": {"tokens": tokens, "next": tokens}},
    )
    columns = [column(name, [6], "int64") for name in ("tokens", "next")]
    network = built(job, {"columns": columns, "splits": {"all": 10}}, "embedded", "h0", "scores")
    block = nn.TransformerEncoderLayer(
        8, 2, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    theirs = {
        "self_attn.in_proj_": "h0_c_attn.", "self_attn.out_proj.": "h0_attn_proj.",
        "linear1.": "h0_c_fc.", "linear2.": "h0_c_proj.",
        "norm1.": "h0_ln_1.", "norm2.": "h0_ln_2.",
    }  # fmt: skip
    ours = network.state_dict()
    block.load_state_dict(
        {f"{a}{part}": ours[f"{b}{part}"] for a, b in theirs.items() for part in ("weight", "bias")}
    )
    ids = torch.randint(0, 11, (3, 6))
    lengths = torch.full((3,), 6)
    found = network({"tokens": ids, "tokens.lengths": lengths})
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    expected = block(found["embedded"], src_mask=mask, is_causal=True)
    assert torch.allclose(found["h0"], expected, atol=1e-5)
    norm = nn.functional.layer_norm(expected, (8,), ours["ln_f.weight"], ours["ln_f.bias"])
    assert torch.allclose(found["scores"], (norm @ ours["wte.weight"].T).mT, atol=1e-5)


def test_the_language_model_may_have_no_biases_and_begin_as_gpt_2_does():
    tokens = {"type": "integer_sequence", "dim": 500}
    sizes = {"num_tokens": 500, "block_size": 64, "num_layers": 8, "num_heads": 2, "width": 64}
    job = spec(
        network=preset("transformer_lm", **sizes, bias=False, initializer_range=0.05),
        loss={"type": "CrossEntropyLoss", "inputs": ["scores", "next"]},
        data={"train": {"dataset": "ds_1"}, "fields": {"tokens": tokens, "next": tokens}},
    )
    columns = [column(name, [64], "int64") for name in ("tokens", "next")]
    network = built(job, {"columns": columns, "splits": {"all": 10}}, "scores")
    torch.manual_seed(0)
    fill(
        parse_spec(planned(job, {"columns": columns, "splits": {"all": 10}})["spec"]).network,
        network,
    )
    found = network.state_dict()
    assert not [name for name in found if name.endswith("bias")]
    spread = {name: float(weight.std()) for name, weight in found.items()}
    for name in ("wte.weight", "wpe.weight", "h0_c_attn.weight", "h7_c_fc.weight"):
        assert spread[name] == pytest.approx(0.05, rel=0.05), name
    for name in ("h0_attn_proj.weight", "h7_c_proj.weight"):  # 16 of them are added up
        assert spread[name] == pytest.approx(0.05 / 4, rel=0.05), name


def test_biases_begin_with_zero_where_first_values_are_gpt_2s():
    found = presets.Preset(
        type="preset", preset="transformer_lm", args={"initializer_range": 0.02}
    ).graph()
    linear = [layer for layer in found.layers if layer.type == "Linear"]
    assert linear
    assert all(layer.init and layer.init["bias"].type == "zeros_" for layer in linear)


def test_resnets_blocks_are_added_to_what_they_read():
    job, meta = images(3, 32, 32, classes=5, network=preset("resnet18", num_classes=5))
    network = built(job, meta, "layer1_1_relu", "layer2_0_relu").eval()
    found = network({"image": torch.rand(2, 3, 32, 32)})
    x, modules = found["layer1_1_relu"], network.layers
    inner = modules["layer2_0_bn1"](modules["layer2_0_conv1"](x)).relu()
    inner = modules["layer2_0_bn2"](modules["layer2_0_conv2"](inner))
    shortcut = modules["layer2_0_downsample_1"](modules["layer2_0_downsample_0"](x))
    assert torch.allclose(found["layer2_0_relu"], (inner + shortcut).relu(), atol=1e-6)
    assert modules["layer2_0_conv1"].stride == (2, 2)


# --- rows of different lengths: each as if it were alone ---------------------------------------

SEQUENCES = {
    "text_cnn": ({"dropout": 0.0, "channels": 4, "embedding_dim": 6}, "fc"),
    "lstm_classifier": ({"hidden_size": 5, "embedding_dim": 4, "bidirectional": True}, "fc"),
    "transformer_classifier": ({"width": 8, "num_heads": 2, "dropout": 0.0}, "fc"),
    "transformer_lm": (
        {"num_tokens": 10, "block_size": 8, "width": 8, "num_heads": 2, "num_layers": 2},
        "scores",
    ),
    "seq2seq": ({"num_entries": 10, "hidden_size": 6, "embedding_dim": 4}, "scores"),
}
READS = {"transformer_lm": ["tokens"], "seq2seq": ["source", "target"]}


@pytest.fixture(scope="module")
def sentences(tmp_path_factory) -> Path:
    rows = [
        {
            "text": row, "tokens": row, "source": row, "label": len(row) % 2, "first": row[0],
            "target": [0, *row[:-1]][:5], "next": row[:5], "after": [*row[1:], 0],
        }
        for row in TEXTS
    ]  # fmt: skip
    return write_ragged(tmp_path_factory.mktemp("sentences"), rows)


def on_sentences(name: str, **changes: Any) -> dict[str, Any]:
    """A job with a preset on rows of ids of different lengths."""
    args, output = SEQUENCES[name]
    target = {"transformer_lm": "after", "seq2seq": "next"}.get(name, "label")
    ids = {"type": "integer_sequence", "dim": 10}
    fields: dict[str, Any] = dict.fromkeys(READS.get(name, ["text"]), ids)
    fields[target] = {"type": "integer", "dim": 2} if target == "label" else ids
    return spec(
        network=preset(name, **args),
        loss={"type": "CrossEntropyLoss", "inputs": [output, target]},
        optimizer={"type": "Adam", "args": {"lr": 0.02}},
        data={"train": {"dataset": "ds_1"}, "fields": fields, "batch_size": 5},
        **changes,
    )


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.long
def test_a_row_gives_the_same_beside_longer_ones_as_alone(sentences, name):
    network = built(on_sentences(name), meta_of(sentences), SEQUENCES[name][1]).eval()
    rows = [TEXTS[4], TEXTS[0], TEXTS[1]]
    fields = READS.get(name, ["text"])
    together = network(_batch(fields, rows))[SEQUENCES[name][1]]
    for number, row in enumerate(rows):
        alone = network(_batch(fields, [row]))[SEQUENCES[name][1]][0]
        own = together[number][..., : alone.shape[-1]] if alone.dim() > 1 else together[number]
        assert torch.allclose(own, alone, atol=1e-5), number


def _batch(fields: list[str], rows: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(len(row) for row in rows)
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return {
        key: value
        for field in fields
        for key, value in ((field, padded), (f"{field}.lengths", lengths))
    }


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.long
def test_it_learns_what_it_is_shown(sentences, tmp_path, name):
    found = losses(run(tmp_path, on_sentences(name, stop={"epochs": 30}), sentences))
    assert sum(found[-3:]) < 0.8 * sum(found[:3])


def test_a_language_model_sees_no_step_that_is_still_to_come(sentences):
    network = built(on_sentences("transformer_lm"), meta_of(sentences), "scores").eval()
    one, other = [3, 1, 4, 1, 5], [3, 1, 4, 7, 7]
    found = network(_batch(["tokens"], [one, other]))["scores"]
    assert torch.equal(found[0][:, :3], found[1][:, :3])
    assert not torch.equal(found[0][:, 3], found[1][:, 3])


def test_rows_longer_than_the_positions_are_refused(sentences):
    job = on_sentences("transformer_lm")
    job["network"]["args"]["block_size"] = 7
    detail = errors(job, meta_of(sentences))["/network/args"]
    assert "8 steps" in detail
    assert "raise num_embeddings" in detail


# --- sparse ------------------------------------------------------------------------------------


def test_two_towers_learn_who_likes_what(tmp_path):
    rows = [
        {"user": [user, 6 + user % 2], "item": [item], "liked": [float(user % 2 == item % 2)]}
        for user in range(6)
        for item in range(4)
    ]
    table = write_ragged(tmp_path / "likes", rows)
    job = spec(
        network=preset("recommender", embedding_dim=8, hidden=[]),
        loss={"type": "BCEWithLogitsLoss", "inputs": ["score", "liked"]},
        optimizer={"type": "Adagrad", "args": {"lr": 0.5}},
        data={
            "train": {"dataset": "ds_1"},
            "fields": {
                "user": {"type": "sparse_binary", "dim": 8},
                "item": {"type": "sparse_binary", "dim": 4},
                "liked": {"type": "dense", "shape": [1]},
            },
            "batch_size": 8,
        },
        stop={"epochs": 40},
    )
    assert losses(run(tmp_path / "job", job, table))[-1] < 0.1


def test_cbow_learns_the_word_between_its_neighbors(tmp_path):
    rng = np.random.default_rng(0)
    words = rng.integers(0, 20, size=(200, 4))
    columns = {"context": words, "label": (words[:, 1] + 1) % 20}
    table = write_table(tmp_path / "words", columns, {"all": slice(None)})
    job = spec(
        network=preset("cbow", num_words=20, embedding_dim=16),
        optimizer={"type": "Adagrad", "args": {"lr": 0.5}},
        data={
            "train": {"dataset": "ds_1"},
            "fields": {
                "context": {"type": "integer_sequence", "dim": 20},
                "label": {"type": "integer", "dim": 20},
            },
        },
        stop={"epochs": 30},
    )
    found = losses(run(tmp_path / "job", job, table))
    assert found[0] > 2.5
    assert found[-1] < 0.5 * found[0]


def test_what_makes_sparse_gradients_needs_an_optimizer_that_takes_them():
    job, meta = images(4, classes=3000, network=preset("cbow", context="image"))
    job["data"]["fields"]["image"] = {"type": "integer_sequence", "dim": 3000}
    meta["columns"][0]["dtype"] = "int64"
    assert planned({**job, "optimizer": {"type": "SGD", "args": {"lr": 0.1}}}, meta)
    adam = {"type": "Adam", "args": {"lr": 0.1}}
    assert "sparse" in errors({**job, "optimizer": adam}, meta)["/optimizer"]
    job["network"]["args"]["sparse"] = False
    assert planned({**job, "optimizer": adam}, meta)


# --- small programs of the documents -----------------------------------------------------------


def test_the_sample_of_the_questions_has_a_gradient_of_one(tmp_path):
    """Four rows of two values, one output, its mean: far above its target, L1's mean is that."""
    x = np.random.default_rng(0).random((4, 2), np.float32)
    target = np.full((4, 1), -100.0, np.float32)
    table = write_table(tmp_path / "four", {"x": x, "y": target}, {"all": slice(None)})
    job = spec(
        network=preset("mlp", hidden=[], num_outputs=1),
        loss={"type": "L1Loss", "inputs": ["out", "y"]},
        optimizer={"type": "SGD", "args": {"lr": 0.01}},
        data={
            "train": {"dataset": "ds_1"},
            "fields": {"x": {"type": "dense"}, "y": {"type": "dense"}},
            "batch_size": 4,
        },
        stop={"steps": 1},
        probes=[
            {"layers": ["out"], "kinds": ["output_grad"], "at": [0], "want": ["full"]},
            {"layers": ["out.*"], "kinds": ["param_grad", "update"], "at": [0], "want": ["full"]},
        ],
    )
    found = captured(run(tmp_path / "job", job, table), tmp_path / "job")
    assert torch.allclose(found[0, "out", "output_grad"], torch.full((4, 1), 0.25))
    assert float(found[0, "out.bias", "param_grad"]) == 1
    assert torch.allclose(found[0, "out.weight", "param_grad"], torch.from_numpy(x).mean(0))
    assert math.isclose(float(found[0, "out.bias", "update"]), -0.01, rel_tol=1e-5)


# --- as a part of a spec -----------------------------------------------------------------------


def test_a_preset_is_its_graph_bit_for_bit(digits, tmp_path):
    named = spec(network=preset("mlp", hidden=[16]), loss=_of_mlp())
    graph = planned(named)["spec"]["network"]
    assert graph["type"] == "graph"
    drawn = spec(network=graph, loss=_of_mlp())
    assert planned(named)["spec"] == planned(drawn)["spec"]
    runs = [run(tmp_path / name, job, digits) for name, job in (("a", named), ("b", drawn))]
    assert losses(runs[0]) == losses(runs[1])
    saved = of_type(runs[0], "checkpoint")[-1]["dir"]
    weights = load_file(tmp_path / "a" / saved / "model.safetensors")
    assert list(weights) == ["fc1.bias", "fc1.weight", "out.bias", "out.weight"]


def _of_mlp() -> dict[str, Any]:
    return {"type": "CrossEntropyLoss", "inputs": ["out", "label"]}


def test_a_preset_keeps_what_was_written():
    text = json.dumps(spec(network=preset("mlp", hidden=[3]), loss=_of_mlp()))
    job = parse_spec(json.loads(text))
    written = job.model_dump(mode="json", exclude_unset=True)["network"]
    assert written == preset("mlp", hidden=[3])
    assert [layer.name for layer in job.network.layers] == ["flat", "fc1", "act1", "out"]


REFUSED = [
    (preset("lost"), "/network/preset", "transformer_lm"),
    (preset("mlp", hiden=[3]), "/network/args/hiden", "no such field"),
    (preset("mlp", hidden=[0]), "/network/args/hidden/0", "at least 1"),
    (preset("mlp", hidden=[3] * 201), "/network/args/hidden", "200"),
    (preset("mlp", dropout=1.5), "/network/args/dropout", "less than 1"),
    (
        preset("transformer_lm", width=10, num_heads=3),
        "/network/args/width",
        "multiple of num_heads",
    ),
    (preset("mnist_cnn", channels=True), "/network/args/channels", "whole number"),
    (preset("cbow"), "/network/args", "'context', which is neither a layer nor a data field"),
    ({"type": "preset"}, "/network/preset", "this field is required"),
    ({"type": "preset", "preset": "mlp", "layers": []}, "/network/layers", "no such field"),
    ({"type": "id", "layers": []}, "/network/type", "'graph'"),
]


@pytest.mark.parametrize(("network", "pointer", "part"), REFUSED)
def test_what_is_wrong_with_a_preset_is_refused_in_its_place(network, pointer, part):
    found = errors(spec(network=network))
    assert pointer in found, found
    assert part in found[pointer]


def test_a_layer_of_a_preset_may_not_have_the_name_of_a_field():
    job, meta = images(4, classes=2, network=preset("mlp"), loss=_of_mlp())
    job["data"]["fields"]["flat"] = job["data"]["fields"].pop("image")
    job["data"]["fields"]["flat"]["column"] = "image"
    reply = answer({"id": 1, "spec": job, "datasets": {"ds_1": meta}})
    assert "'flat' names a layer and a data field" in reply["errors"][0]["detail"]


def test_the_catalog_lists_every_file_of_the_folder():
    entries = catalog.section("presets")
    folder = Path(presets.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "layers", "blocks"}
    assert {entry["name"] for entry in entries} == files == set(PRESETS)
    for entry in entries:
        assert entry["summary"]
        assert entry["schema"]["additionalProperties"] is False
        drawn = Preset.model_validate_json(json.dumps(preset(entry["name"])))
        assert entry["outputs"] == list(drawn.outputs or [drawn.layers[-1].name])


def test_the_catalog_says_which_layer_of_a_preset_a_loss_reads():
    outputs = {entry["name"]: entry["outputs"] for entry in catalog.section("presets")}
    assert (outputs["mlp"], outputs["mnist_cnn"]) == (["out"], ["fc"])
    job, meta = images(1, 28, 28, classes=10, network=preset("mnist_cnn"))
    assert "plan" in answer({"id": 1, "spec": job, "datasets": {"ds_1": meta}})
    job["loss"]["inputs"] = [outputs["mlp"][0], "label"]
    assert "errors" in answer({"id": 1, "spec": job, "datasets": {"ds_1": meta}})


def test_the_largest_sizes_make_no_graph_that_is_too_large():
    deep = preset("transformer_lm", num_layers=200, num_heads=1, width=1)
    layers = Preset.model_validate_json(json.dumps(deep)).layers
    assert len(layers) < 10_000
    assert math.prod([1, *layers[-1].args.values()]) == 2
