"""The direction of a metric, against what torchmetrics says of its own classes."""

import pytest

from engine.metrics.torch_metrics import metric_classes
from glasshouse.metric_direction import direction_of, sources_of

NAMES = {
    "loss": "min",
    "validation/loss": "min",
    "validation/loss/MSELoss": "min",
    "loss/reconstruction": "min",
    "accuracy": "max",
    "validation/accuracy": "max",
    "validation/accuracy_top5": "max",
    "validation/accuracy/fc": "max",
    "correct_fraction(fc,label)": "max",
    "cosine_similarity(fc1,fc2)": "max",
    "mean_abs_diff(fc1,fc2)": "min",
    "mean_squared_diff(accuracy,label)": "min",
    "validation/MulticlassF1Score/3": "max",
    "validation/val_acc": "max",
    "validation/rmse": "min",
    "validation/R2Score": "max",
}
UNKNOWN = ("lr", "grad_norm", "l2(fc)", "validation/quality", "lower", "concert", "time/step")


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_metric_reports_which_values_are_better(name):
    assert direction_of(name) == NAMES[name]


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_that_reports_nothing_has_no_direction(name):
    assert direction_of(name) is None


def test_the_name_of_a_source_says_nothing_about_its_metrics():
    names = [
        "loss",
        "lr",
        "validation/hits/loss",
        "validation/hits/loss/bce",
        "validation/errors/loss",
        "validation/errors/accuracy/fc",
        "validation/hits/MulticlassRecall/3",
    ]
    sources = sources_of(names)
    assert sources == {"hits", "errors"}
    assert [direction_of(name, sources) for name in names] == [
        "min",
        None,
        "min",
        "min",
        "min",
        "max",
        "max",
    ]


def test_a_source_without_a_name_has_none():
    """Also if a metric is named as if it were the loss of a source."""
    assert sources_of(["validation/loss", "validation/clean/loss"]) == set()
    assert sources_of(["loss", "validation/accuracy"]) == set()


def test_every_class_of_torchmetrics_has_the_direction_that_it_gives_itself():
    known = {
        name: cls.higher_is_better
        for name, cls in metric_classes().items()
        if getattr(cls, "higher_is_better", None) is not None
    }
    assert len(known) > 50
    for name, is_higher in known.items():
        assert direction_of(f"validation/{name}") == ("max" if is_higher else "min"), name
