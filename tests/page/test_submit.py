"""A new job: the form, the JSON and the plan show one spec, and the copied commands run."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Locator, Page, expect

import glasshouse as gh
from tests.acceptance.services import ROOT, LocalService
from tests.page import specs
from tests.page.browser import Screenshot, Witness, as_on, drawn

Axe = Callable[[Page], None]
REFUSED = r"status of 422"
TIMES = " \N{MULTIPLICATION SIGN} "


def opened(page: Page, query: str) -> Page:
    """The form, once its plan is up to date."""
    page.goto(f"/submit?{query}")
    planned(page)
    return page


def planned(page: Page) -> None:
    expect(page.get_by_role("status").filter(has_text="up to date")).to_be_visible()


def field(page: Page, pointer: str) -> Locator:
    """The input of a JSON pointer."""
    return page.locator(f"[id='at{pointer}']").locator("input, select").first


def on_screen(page: Page) -> Any:
    """The spec in the JSON view; then back to the form."""
    page.get_by_role("link", name="JSON", exact=True).click()
    text = page.get_by_role("textbox", name="Spec as JSON").input_value()
    page.get_by_role("link", name="Form", exact=True).click()
    expect(page.get_by_role("textbox", name="Spec as JSON")).to_have_count(0)
    return json.loads(text)


def written(page: Page, text: str) -> None:
    """Paste another spec; then back to the form."""
    page.get_by_role("link", name="JSON", exact=True).click()
    page.get_by_role("textbox", name="Spec as JSON").fill(text)
    page.get_by_role("link", name="Form", exact=True).click()


def shown_bytes(value: int) -> str:
    """A size as the dashboard formats it."""
    left, unit = float(value), 0
    while left >= 1000:
        left, unit = left / 1000, unit + 1
    digits = 1 if unit and left < 100 else 0
    return f"{left:.{digits}f} {['B', 'kB', 'MB', 'GB'][unit]}"


def small(page: Page, name: str) -> None:
    """Make the job short."""
    field(page, "/name").fill(name)
    field(page, "/network/args/hidden").fill("16")
    field(page, "/stop/epochs").fill("1")
    planned(page)


def test_a_job_from_the_form_has_its_spec_and_plan(
    page: Page, client: gh.Client, http: httpx2.Client, digits: str, screenshot: Screenshot
):
    opened(page, f"dataset={digits}")
    small(page, "made in the form")
    field(page, "/seed").fill("7")
    field(page, "/optimizer/type").select_option(label="SGD")
    field(page, "/optimizer/args/lr").fill("0.05")
    planned(page)
    spec = on_screen(page)
    assert (spec["seed"], spec["optimizer"]) == (7, {"type": "SGD", "args": {"lr": 0.05}})
    assert spec["network"] == {"type": "preset", "preset": "mlp", "args": {"hidden": [16]}}
    plan = http.post("/plan", json=spec).json()
    planned(page)
    shows_plan(page, plan)
    screenshot("submit")
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(re.compile(r"/jobs/job_[^/]+$"))
    job = client.jobs.get(page.url.rsplit("/", 1)[1]).wait(timeout=300)
    assert job.state == "succeeded"
    assert job.spec(resolved=False) == spec
    assert job.spec()["network"] == plan["spec"]["network"]
    assert job.spec()["optimizer"] == plan["spec"]["optimizer"]


def shows_plan(page: Page, plan: dict[str, Any]) -> None:
    """The plan shown is the service's."""
    pane = page.get_by_role("region", name="Plan")
    expect(pane.locator("[data-plan=parameters]")).to_have_text(f"{plan['parameters']:,}")
    expect(pane.locator("[data-plan=flops]")).to_have_text(f"{plan['flops']:,}")
    expect(pane.locator("[data-plan=steps]")).to_have_text(f"{plan['num_steps']:,}")
    for head, value in plan["memory"].items():
        if value:
            expect(pane.locator(f"[data-plan={head}]")).to_have_text(shown_bytes(value))
    rows = pane.get_by_role("table", name="Layers").locator("tbody tr")
    expect(rows).to_have_count(len(plan["layers"]))
    for row, layer in zip(rows.all(), plan["layers"], strict=True):
        cells = row.locator("td").all_inner_texts()
        shape = TIMES.join(map(str, layer["output_shape"]))
        assert cells[:4] == [layer["name"], layer["type"], shape, f"{layer['parameters']:,}"]


def test_the_plan_shows_the_stages_of_a_pipeline(page: Page, http: httpx2.Client, digits: str):
    opened(page, f"dataset={digits}")
    spec = on_screen(page)
    spec["parallel"] = {"strategy": "pipeline", "processes": 2, "micro_batches": 4}
    spec["devices"] = {"type": "cpu", "threads": 1}
    written(page, json.dumps(spec))
    planned(page)
    plan = http.post("/plan", json=spec).json()
    shows_plan(page, plan)
    pane, parallel = page.get_by_role("region", name="Plan"), plan["parallel"]
    rows = pane.get_by_role("table", name="Stages").locator("tbody tr")
    expect(rows).to_have_count(2)
    for row, stage in zip(rows.all(), parallel["stages"], strict=True):
        assert row.locator("td").all_inner_texts() == [
            *(str(stage["stage"]), str(stage["process"]), str(len(stage["layers"]))),
            *(shown_bytes(stage["memory"]["total_bytes"]), shown_bytes(stage["sent_bytes"])),
        ]
    expect(pane).to_contain_text("Schedule 1f1b, 4 micro-batches: a process waits 20%")
    (chosen,) = pane.get_by_role("table", name="Strategies").locator("tbody tr").all()
    assert chosen.locator("td").first.inner_text() == "pipeline"


def test_without_a_dataset_one_button_creates_a_spec_that_can_be_submitted(
    stranger: Page, local_service: LocalService
):
    with local_service.another_key("somebody new", "submit").client() as visitor:
        stranger.goto(visitor.browser_link())
        stranger.goto("/submit")
        stranger.get_by_role("button", name="Use the built-in digits").click()
        planned(stranger)
        expect(stranger.get_by_role("button", name="Submit")).to_be_enabled()
        (dataset,) = visitor.datasets.list()
        assert on_screen(stranger)["data"]["train"] == {"dataset": dataset.id, "split": "train"}


def test_a_wrong_argument_is_shown_at_its_field_and_the_list_links_to_it(
    page: Page, witness: Witness, digits: str
):
    witness.expect(REFUSED)
    opened(page, f"dataset={digits}")
    rate = field(page, "/optimizer/args/lr")
    rate.fill("fast")
    expect(rate).to_have_attribute("aria-invalid", "true")
    expect(page.locator("[id='at/optimizer/args/lr'] .wrong")).to_contain_text("number")
    assert on_screen(page)["optimizer"]["args"]["lr"] == "fast"
    listed = page.get_by_role("alert").get_by_role("button", name="/optimizer/args/lr")
    listed.click()
    expect(field(page, "/optimizer/args/lr")).to_be_focused()
    field(page, "/optimizer/args/lr").fill("0.01")
    planned(page)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_layers_are_added_moved_and_removed_and_an_error_is_found(
    page: Page, witness: Witness, http: httpx2.Client, digits: str
):
    witness.expect(REFUSED)
    opened(page, f"dataset={digits}")
    page.get_by_role("button", name="Edit layers").click()
    planned(page)
    names = [layer["name"] for layer in on_screen(page)["network"]["layers"]]
    assert names == ["flat", "fc1", "act1", "out"]
    planned(page)
    page.locator("[id='at/network/layers/2'] > summary").click()
    page.get_by_role("button", name="Insert after").click()
    field(page, "/network/layers/3/name").fill("drop")
    kind = field(page, "/network/layers/3/type")
    assert "Dropout" in page.locator("datalist#layers option").evaluate_all(
        "(all) => all.map((it) => it.value)"
    )
    kind.fill("Dropout")
    field(page, "/network/layers/3/args/p").fill("0.25")
    planned(page)
    page.get_by_role("button", name="Move up").click()
    planned(page)
    spec = on_screen(page)
    layer = {"name": "drop", "type": "Dropout", "args": {"p": 0.25}}
    assert spec["network"]["layers"][2] == layer
    planned(page)
    shows_plan(page, http.post("/plan", json=spec).json())
    # the row is collapsed: the link expands it
    spec["network"]["layers"][2]["args"] = {"p": 7}
    written(page, json.dumps(spec))
    listed = page.get_by_role("alert").get_by_role("button", name="/network/layers/2")
    listed.first.click()
    expect(page.locator("[id='at/network/layers/2']")).to_have_attribute("open", "")
    page.get_by_role("button", name="Remove", exact=True).click()
    planned(page)
    names = [layer["name"] for layer in on_screen(page)["network"]["layers"]]
    assert names == ["flat", "fc1", "act1", "out"]


def test_form_and_json_are_two_views_and_unknown_fields_are_kept(
    page: Page, witness: Witness, digits: str
):
    witness.allow(REFUSED)  # the plan of a text that changes at once is not requested
    opened(page, f"dataset={digits}")
    spec = on_screen(page) | {"mystery": {"deep": [1, None]}, "labels": {"a/b": "c"}}
    written(page, json.dumps(spec))
    unknown = page.get_by_label("mystery (unknown field)")
    expect(unknown).to_have_value('{"deep":[1,null]}')
    field(page, "/seed").fill("5")
    assert on_screen(page) == spec | {"seed": 5}
    page.get_by_role("link", name="JSON", exact=True).click()
    text = page.get_by_role("textbox", name="Spec as JSON")
    text.fill('{"kind": ')
    expect(page.get_by_role("alert").filter(has_text="Invalid JSON")).to_be_visible()
    expect(page.get_by_role("button", name="Submit")).to_be_disabled()
    text.fill(json.dumps({key: value for key, value in spec.items() if key != "mystery"}))
    planned(page)


def test_a_double_click_creates_one_job_whose_spec_can_be_reused(
    page: Page, client: gh.Client, digits: str
):
    opened(page, f"dataset={digits}")
    small(page, "clicked twice")
    page.get_by_role("button", name="Submit").dblclick()
    page.wait_for_url(re.compile(r"/jobs/job_[^/]+$"))
    (job,) = client.jobs.list(q="clicked twice")
    opened(page, f"from={job.id}")
    assert on_screen(page) == job.spec(resolved=False)
    job.wait(timeout=300)


def test_copied_commands_run_and_submit_the_same_spec(
    page: Page, local_service: LocalService, client: gh.Client, digits: str, tmp_path: Path
):
    opened(page, f"dataset={digits}")
    small(page, 'it\'s a "copy" of $HOME')
    spec = on_screen(page)
    ran = {
        name: run_copy(page, local_service, name, tmp_path) for name in ("curl", "Python", "CLI")
    }
    jobs = list(client.jobs.list(q="it's a"))
    assert len(jobs) == 3, ran
    for job in jobs:
        assert job.spec(resolved=False) == spec
        assert job.wait(timeout=300).state == "succeeded"


def run_copy(page: Page, local_service: LocalService, name: str, folder: Path) -> str:
    """Run a copied command, with a key in the environment."""
    page.get_by_role("button", name=name, exact=True).click()
    text = page.locator(f"pre[aria-label='As {name}']").inner_text()
    assert local_service.key not in text
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    known = {"PATH": path, "HOME": str(folder), "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", text] if name == "Python" else ["bash", "-c", text]
    done = subprocess.run(
        command,
        env=known | {"GLASSHOUSE_API_KEY": local_service.key},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_form_has_no_serious_axe_findings(
    page: Page, axe: Axe, digits: str, size: tuple[int, int], scheme: Any
):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": size[0], "height": size[1]})
    opened(page, f"dataset={digits}")
    page.get_by_role("button", name="Edit layers").click()
    planned(page)
    page.locator("[id='at/network/layers/1'] > summary").click()
    page.get_by_role("button", name="curl", exact=True).click()
    drawn(page)
    axe(page)
    width = page.evaluate("() => document.documentElement.scrollWidth")
    assert width <= size[0], "the page is wider than the screen"
    page.get_by_role("link", name="JSON", exact=True).click()
    axe(page)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_id_of_a_dataset_fits_its_field(page: Page, digits: str, width: int):
    page.set_viewport_size({"width": width, "height": 844})
    opened(page, f"dataset={digits}")
    written = field(page, "/data/train/dataset")
    expect(written).to_have_value(digits)
    assert written.evaluate("(it) => it.scrollWidth - it.clientWidth") <= 0


def test_a_long_layer_name_stays_in_its_box(page: Page, client: gh.Client, digits: str):
    name = "encoder_block_11_self_attention_output_projection_of_the_query"
    spec = specs.small(digits, "a long layer", stop={"steps": 1})
    spec["network"]["layers"][-1]["name"] = name
    spec["loss"]["inputs"] = [name, "label"]
    spec["network"].pop("outputs", None)
    job = client.jobs.create(spec).wait(timeout=120)
    with as_on(page, "phone"):
        page.goto(f"/submit?from={job.id}")
        summary = page.locator(".layer > summary").filter(has_text=name)
        expect(summary).to_be_visible()
        box, text = summary.bounding_box(), summary.locator("strong").bounding_box()
        assert box is not None
        assert text is not None
        assert text["x"] + text["width"] <= box["x"] + box["width"]
