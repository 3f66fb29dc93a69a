"""What watching shows."""

import io
import math
import re
from typing import Any

from rich.console import Console

from glasshouse.cli.jobs.job_view import JobView, sparkline
from glasshouse.events import STATS_COLUMNS
from tests.stub_api import job


def stats(step: int, *rows: list[Any]) -> dict[str, Any]:
    """A ``stats`` event; a row is layer, kind, mean, std, l2, nan."""
    full = [
        [layer, kind, mean, std, -1.0, 1.0, l2, 1.0, 0.1, nan, 0]
        for layer, kind, mean, std, l2, nan in rows
    ]
    columns = list(STATS_COLUMNS)
    return {"type": "stats", "step": step, "phase": "train", "columns": columns, "rows": full}


def metrics(step: int, **values: Any) -> dict[str, Any]:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return {"type": "metrics", "step": step, "epoch": 3, "values": named}


def shown(view: JobView, width: int = 80) -> str:
    text = io.StringIO()
    Console(file=text, width=width, force_terminal=False).print(view)
    return text.getvalue()


def test_the_view_shows_progress_loss_accuracy_and_every_watched_layer():
    view = JobView(job(progress={**job()["progress"], "eta_s": 75.0}))
    for step in range(50):
        view.see(metrics(step, loss=2.0 / (step + 1), lr=0.01))
    view.see(metrics(49, validation__loss=0.0123456, validation__accuracy=0.9712))
    view.see(
        stats(50, ["conv1", "output", 0.25, 1.5, 9.0, 0], ["conv1", "output_grad", 0, 0, 0.125, 0])
    )
    view.see(
        stats(
            50, ["fc", "output", "NaN", "NaN", "NaN", 7], ["fc.weight", "param_grad", 0, 0, 3.0, 0]
        )
    )
    view.see(stats(50, ["fc.bias", "param_grad", 0, 0, 4.0, 0]))
    text = shown(view)
    for told in (
        "job_1",
        "running",
        "step 49 (1000 in all)",
        "epoch 3",
        "ETA 1:15",
        "loss 0.04",
        "0.9712",
    ):
        assert told in text, told
    conv1, fc = (line for line in text.splitlines() if line.startswith(("conv1", "fc ")))
    assert conv1.split() == ["conv1", "0.25", "1.5", "0.125", "-"]
    assert fc.split() == ["fc", "nan", "nan", "-", "5", "7"]  # 3 and 4 make 5
    head = next(line for line in text.splitlines() if line.startswith("layer"))
    assert re.split("  +", head.strip())[3:5] == ["act. grad", "weight grad"]


def test_nothing_is_wider_than_80_columns():
    view = JobView(job(id="job_" + "0" * 26, name="a name that never ever ends " * 5))
    name = "a_layer_with_a_name_of_64_characters_" + "x" * 27
    view.see(
        stats(
            1,
            [name, "output", -1.2345e-30, 1.2345e30, 1.0, 123456],
            [name, "output_grad", 0, 0, -1e-30, 0],
        )
    )
    view.see(metrics(123456, loss=1.2345e-30, validation__accuracy=0.5, validation__loss=2.5))
    assert max(map(len, shown(view).splitlines())) <= 80


def test_an_ended_job_shows_how_it_ended():
    view = JobView(job())
    view.see({"type": "state", "from": "running", "to": "cancelling", "reason": None})
    assert "cancelling" in shown(view)
    view.see({"type": "end", "state": "cancelled"})
    assert "cancelled" in shown(view)


def test_a_line_names_the_figures_and_marks_nan():
    view = JobView(job())
    view.see(metrics(7, loss="NaN"))
    view.see(stats(7, ["fc", "output", 0, 0, 0, 3]))
    assert view.line() == "step 7 (1000 in all)  loss nan  NaN/Inf 3"


def test_a_sparkline_goes_from_high_to_low_and_marks_what_is_nan_or_inf():
    assert sparkline([3.0, 2.0, 1.0], 10) == "█▅▁"
    assert sparkline([1.0, math.nan, 2.0], 10) == "▁!█"
    assert sparkline([math.inf], 10) == "!"
    assert sparkline([], 10) == ""
    assert sparkline([1.0] * 100, 10) == "▁" * 10


def test_commands_to_a_job_are_reported():
    view = JobView(job(state="pausing"))
    assert "pausing" in shown(view)
    told = {"type": "command", "command": "cmd_1", "state": "applied", "step": 40, "problem": None}
    change = {
        "set": {"optimizer.lr": 0.5},
        "old": {"optimizer.lr": 1},
        "new": {"optimizer.lr": 0.5},
    }
    view.see(told | change)
    view.see(told | {"do": "evaluate", "old": None, "new": None})
    problem = {"code": "too_small", "detail": "it has made 40 steps already"}
    view.see(told | {"set": {"stop.steps": 4}, "state": "rejected", "problem": problem})
    assert list(view.notes) == [
        "from step 40: optimizer.lr 1 → 0.5",
        "evaluate requested before step 40",
        "rejected at step 40: stop.steps: it has made 40 steps already",
    ]


def test_findings_are_reported():
    view = JobView(job())
    view.see({"type": "finding", "message": "Step 7: the loss not finite."})
    assert "the loss not finite" in shown(view)


def test_the_view_forgets_what_a_later_attempt_runs_again():
    view = JobView(job())
    for step in range(10):
        view.see(metrics(step, loss=float(step)))
    view.see(stats(4, ["conv1", "output", 0.25, 1.5, 9.0, 0]))
    view.see(stats(9, ["fc", "output", 0.5, 2.5, 8.0, 0]))
    view.see({"type": "attempt", "n": 2, "resumed_from_step": 6})
    assert [step for step, _ in view.losses] == [0, 1, 2, 3, 4, 5]
    assert (view.step, view.values["loss"], list(view.layers)) == (5, 5.0, ["conv1"])
    assert "attempt 2 resumed from step 6" in shown(view)
    view.see({"type": "attempt", "n": 3, "resumed_from_step": 0})
    assert (view.step, view.values, list(view.losses), view.layers) == (None, {}, [], {})


def seen_layers(count: int) -> JobView:
    """A view of so many layers, the last of which is not finite."""
    view = JobView(job())
    for step in range(3):
        rows = [[f"fc{n}", "output", 0.5, 1.0 + step, 1.0, 0] for n in range(count - 1)]
        view.see(stats(step, *rows, ["last", "output", "NaN", "NaN", 1.0, 4]))
    return view


def in_terminal(view: JobView, width: int, height: int, encoding: str = "utf-8") -> str:
    """What a terminal of this size shows, without its colors."""
    text = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    console = Console(
        file=text, width=width, height=height, force_terminal=True, color_system=None, emoji=False
    )
    console.print(view)
    text.seek(0)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.read())


def test_a_terminal_shows_as_many_layers_as_it_has_lines_and_the_bad_ones_first():
    lines = in_terminal(seen_layers(1000), 80, 24).splitlines()
    assert len(lines) < 24
    shown = [line.split()[0] for line in lines if line.startswith(("fc", "last"))]
    assert len(shown) > 10
    assert shown[-1] == "last"
    assert f"and {1000 - len(shown)} more layers" in lines[-1]
    assert len(in_terminal(seen_layers(10), 80, 24).splitlines()) < 24
    assert "more layers" not in in_terminal(seen_layers(10), 80, 24)


def test_a_layer_has_a_sparkline_of_its_standard_deviation_if_it_fits():
    row = next(line for line in in_terminal(seen_layers(3), 80, 24).splitlines() if "fc0" in line)
    assert row.split() == ["fc0", "0.5", "3", "▁▅█"]
    assert "std so far" not in in_terminal(seen_layers(3), 36, 24)


def test_a_terminal_without_the_characters_gets_others():
    view = seen_layers(3)
    for step in range(3):
        view.see(metrics(step, loss=float(step)))
    text = in_terminal(view, 80, 24, "ascii")
    assert "loss 2 _=#" in text
    assert "_=#" in next(line for line in text.splitlines() if line.startswith("fc0"))


def test_what_is_nan_or_inf_is_an_alarm_until_a_later_attempt_runs_it_again():
    view = JobView(job())
    assert view.see(metrics(3, loss=1.0)) == []
    assert view.see(stats(4, ["fc", "output", 0, 0, 0, 3])) == [
        "NaN or Inf from step 4 on: fc output"
    ]
    assert view.see(metrics(5, loss="NaN")) == ["NaN or Inf from step 5 on: loss"]
    assert view.see(metrics(6, loss="NaN")) == []
    assert "! NaN or Inf since step 4: fc output, loss" in shown(view)
    view.see({"type": "attempt", "n": 2, "resumed_from_step": 5})
    assert "! NaN or Inf since step 4: fc output\n" in shown(view).replace(" \n", "\n")
    view.see({"type": "attempt", "n": 3, "resumed_from_step": 0})
    assert "NaN or Inf" not in shown(view)
