"""Validation errors use this service's wording, the same for every field."""

import json
import re
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from glasshouse import spec
from glasshouse.errors import FieldProblem
from glasshouse.spec import augmentation
from glasshouse.spec.error_messages import problems_in

WRONG: tuple[Any, ...] = (
    *(None, True, "auto", "", -1, 0, 1.5, 10**30, 1e300, "NaN", "x" * 10_000),
    *([], {}, [[]], [None], ["x"] * 3, [{}], list(range(1, 11)), ["x"] * 1100),
    *({"a": 1}, {"a b": 1}, {"type": "nope"}, {"type": "nope", "every": 1}),
    {str(number): number for number in range(200)},
)
PYDANTIC = re.compile(
    "Input should|should (have|match)|Unable to|not permitted|Field required|Tuple|Dictionary"
    "|discriminator|validat(?!ion)|instance of"
)


def models() -> list[type[BaseModel]]:
    """Every model that a job's spec is made of, found from the outermost ones."""
    found: list[type[BaseModel]] = [*spec.KINDS]
    for model in found:  # grows while it is gone through
        for field in model.model_fields.values():
            found += [one for one in _within(field.annotation) if one not in found]
    return found


def _within(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _within(part)]


def problems_of(model: type[BaseModel], body: Any) -> list[FieldProblem]:
    """What is said of this body; nothing, if it is one."""
    try:
        model.model_validate_json(json.dumps(body))
    except ValidationError as error:
        return problems_in(error.errors(include_url=False), body, model)
    return []


def test_all_models_are_tried():
    assert {spec.Data, spec.IntegerField, spec.Probe, augmentation.CropArgs} <= set(models())
    assert len(models()) > 50


@pytest.mark.parametrize("model", models(), ids=lambda model: model.__name__)
@pytest.mark.long
def test_no_field_answers_in_pydantics_words(model: type[BaseModel]):
    for name, field in model.model_fields.items():
        key = field.alias or name
        for value in WRONG:
            found = [one for one in problems_of(model, {key: value}) if one.pointer != ""]
            of_field = [one for one in found if f"{one.pointer}/".startswith(f"/{key}/")]
            for problem in of_field:
                assert not PYDANTIC.search(problem.detail), problem
            places = [one.pointer for one in of_field if one.detail.startswith("give ")]
            assert len(places) == len(set(places)), f"a value is refused several times: {of_field}"
            others = [one for one in found[:50] if f"{one.pointer}/".split("/")[1] != key]
            also = {one.code for one in others if not one.detail.endswith("none is given")}
            assert also <= {"missing"}, f"{key} is wrong, not {others}"


@pytest.mark.parametrize("model", models(), ids=lambda model: model.__name__)
def test_a_misspelled_field_gets_a_suggestion(model: type[BaseModel]):
    for name, field in model.model_fields.items():
        key = field.alias or name
        if len(key) < 4:
            continue
        wrong = key[:-2] + key[-1]
        (problem,) = [one for one in problems_of(model, {wrong: 1}) if one.pointer == f"/{wrong}"]
        assert "did you mean " in problem.detail
        assert key in re.split(", | or |[?]| mean ", problem.detail), problem.detail


TRAIN: dict[str, Any] = {
    "kind": "train",
    "network": {"layers": [{"name": "fc", "type": "Linear"}]},
    "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
    "optimizer": {"type": "SGD"},
    "data": {
        "train": {"dataset": "ds"},
        "fields": {"x": {"type": "dense"}, "label": {"type": "integer"}},
        "batch_size": 2,
    },
    "stop": {"steps": 1},
}


def of_label(**more: Any) -> dict[str, Any]:
    """A change of the data: what else the field of the classes says."""
    fields = TRAIN["data"]["fields"]
    return TRAIN["data"] | {"fields": fields | {"label": {"type": "integer", **more}}}


def of_image(**more: Any) -> dict[str, Any]:
    """A change of the data: what else the dense field says."""
    fields = TRAIN["data"]["fields"]
    return TRAIN["data"] | {"fields": fields | {"x": {"type": "dense", **more}}}


PROBE = {"layers": ["fc"], "kinds": ["output"], "every": 1}
JITTER = {"type": "ColorJitter", "args": {"contrast": [1, "x"]}}


@pytest.mark.parametrize(
    ("change", "pointer", "begins"),
    [
        (
            {"data": of_label(classes="auto")},
            "/data/fields/label/classes",
            "give a list (got 'auto'): The values of the column in the order of their classes: all"
            " texts, or all integers.",
        ),
        (
            {"probes": [PROBE] * 10_000},
            "/probes",
            "it has 10,000 items, and can have at most 1,000: Probes from the first step on. A"
            " probe can match several layers by globs.",
        ),
        (
            {"data": of_image(fill="most")},
            "/data/fields/x/fill",
            "give a number or 'mean', 'median' or 'NaN' (got 'most'): Replacement for",
        ),
        (
            {"data": of_image(augment=[JITTER])},
            "/data/fields/x/augment/0/args/contrast/1",
            "give a number (got 'x')",
        ),
        (
            {"data": of_label(type="dence")},
            "/data/fields/label/type",
            "'dence' is not one of 'dense', ",
        ),
        ({"data": of_label(dim=0)}, "/data/fields/label/dim", "it must be greater than 0 (got 0)"),
        (
            {"data": of_label(rows=3)},
            "/data/fields/label/rows",
            "there is no such field; the fields are",
        ),
        ({"stop": {"epoch": 3}}, "/stop/epoch", "there is no such field; did you mean epochs?"),
        ({"precision": "half"}, "/precision", "give 'float32', 'bfloat16', 'float16' or 'auto' (g"),
        (
            {"precision": "bfloat"},
            "/precision",
            "give 'float32', 'bfloat16', 'float16' or 'auto' (got 'bfloat'; did you mean"
            " bfloat16?)",
        ),
        (
            {"devices": {"type": "gpu"}},
            "/devices/type",
            "give 'auto', 'cpu' or 'cuda' (got 'gpu'; did you mean cuda?): cpu: CPU cores.",
        ),
        (
            {"devices": {"kind": "cpu"}},
            "/devices/kind",
            "there is no such field; did you mean type?",
        ),
        (
            {"metrics": [{"type": "acuracy", "inputs": ["fc", "label"]}]},
            "/metrics/0/type",
            "a class of torchmetrics, or one of: accuracy, mean_abs_diff, mean_squared_diff,"
            " cosine_similarity, l2_ratio, correct_fraction, mean, l2; did you mean accuracy?",
        ),
        (
            {"network": {"type": "preset", "preset": "resnet81"}},
            "/network/preset",
            "give 'cbow', 'lstm_classifier', 'mlp', 'mnist_cnn', 'recommender', 'resnet18',"
            " 'seq2seq', 'text_cnn', 'transformer_classifier' or 'transformer_lm' (got 'resnet81';"
            " did you mean resnet18?)",
        ),
        (
            {"network": {"type": "preset", "preset": "mlp", "args": {"hiden": [3]}}},
            "/network/args/hiden",
            "there is no such field; did you mean hidden?",
        ),
        (
            {"network": {"type": "preset", "preset": "mlp", "args": {"hidden": 3}}},
            "/network/args/hidden",
            "give a list (got 3)",
        ),
        ({"tune": "yes"}, "/tune", "give true or false (got 'yes'): Whether to select"),
        ({"tune": None}, "/tune", "give true or false (got null)"),
        ({"devices": []}, "/devices", "give an object"),
        ({"stop": {}}, "/stop/epochs", "give exactly one of epochs, steps, seconds"),
        ({"optimizer": {}}, "/optimizer/type", "this field is required"),
        ({"loss": "MSELoss"}, "/loss", "give an object or a list (got 'MSELoss')"),
        ({"loss": []}, "/loss", "it must not be empty"),
        ({"loss": [{"type": 3, "inputs": ["fc"]}]}, "/loss/0/type", "give a string (got 3)"),
        (
            {"data": TRAIN["data"] | {"train": None}},
            "/data/train",
            "give an object or a list (got null): The training rows.",
        ),
        (
            {"activation_checkpointing": False},
            "/activation_checkpointing",
            "give true or a list (got false): Saves memory at the cost of time",
        ),
        (
            {"activation_checkpointing": ["fc", 3]},
            "/activation_checkpointing/1",
            "give a string (got 3): Saves memory",
        ),
    ],
)
def test_a_mistake_is_reported_once_with_what_to_write_instead(
    change: dict[str, Any], pointer: str, begins: str
):
    (problem,) = problems_of(spec.TrainJob, TRAIN | change)
    assert problem.pointer == pointer
    assert problem.detail.startswith(begins), problem.detail


def test_a_body_of_an_unknown_model_is_reported():
    wrong = {"tune": 3, "zeal": 1}
    try:
        spec.TrainJob.model_validate_json(json.dumps(TRAIN | wrong))
    except ValidationError as error:
        found = problems_in(error.errors(), TRAIN | wrong, most=1)
        rest = problems_in(error.errors(), TRAIN | wrong)
    assert [one.detail for one in found] == ["give true or false (got 3)"]
    assert [one.detail for one in rest][1:] == ["there is no such field"]
