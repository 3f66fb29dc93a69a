"""The view of a job with NaN or Inf: the layer, the step, and the log."""

import math
import re
from collections.abc import Callable

import httpx2
import pytest
from playwright.sync_api import Page, expect

import glasshouse as gh
from tests.page.browser import Screenshot
from tests.page.tabs import table_of
from tests.page.test_job import chart, spec

Axe = Callable[[Page], None]
LAYERS = [
    {"name": "flat", "type": "Flatten", "inputs": ["image"]},
    {"name": "hidden", "type": "Linear", "args": {"out_features": 16}},
    {"name": "relu", "type": "ReLU"},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]
WILD = {
    "optimizer": {"type": "SGD", "args": {"lr": 1e30}},
    "network": {"type": "graph", "layers": LAYERS, "outputs": ["fc"]},
}


@pytest.fixture(scope="module")
def failed(client: gh.Client, digits: str) -> gh.Job:
    """A job that fails because its learning rate is far too high."""
    guards = {"nonfinite": {"check": ["loss"], "action": "fail"}}
    job = client.jobs.create(spec(digits, "wild one", guards=guards) | WILD)
    with pytest.raises(gh.JobFailed):
        job.wait(timeout=120)
    return job.refresh()


def test_the_failure_is_explained_where_it_happened(page: Page, failed: gh.Job):
    error = failed.error or {}
    page.goto(f"/jobs/{failed.id}")
    box = page.get_by_role("region", name="Why the job failed")
    expect(box).to_contain_text(error["message"])
    expect(box).to_contain_text(error["hint"])
    expect(box).to_contain_text("NaN or Inf")
    (finding, *_) = failed.events(["finding"])
    for cause in finding.causes:
        expect(box.get_by_role("listitem").filter(has_text=cause)).to_be_visible()
    layer = box.get_by_role("link", name=error["layer"], exact=True)
    expect(layer).to_have_attribute(
        "href", f"/jobs/{failed.id}/layers/{error['layer']}?step={error['step']}"
    )
    expect(box.get_by_role("link", name="non_finite")).to_have_attribute(
        "href", "/errors/non_finite"
    )
    box.get_by_text("Last lines of the log").click()
    expect(box.locator("pre")).to_contain_text(str(error["log_tail"]).splitlines()[-1])
    expect(box.locator("pre")).not_to_contain_text("Traceback")
    step = box.get_by_role("link", name=str(error["step"]), exact=True)
    expect(step).to_have_attribute("href", re.compile(rf"to={error['step']}$"))
    expect(page.get_by_text(f"step {error['step']} of", exact=False).first).to_be_visible()


def test_a_nan_is_marked_and_links_to_the_layer(page: Page, failed: gh.Job, http: httpx2.Client):
    expected = http.get(f"/jobs/{failed.id}/metrics/query", params={"name": "loss"}).json()
    bad = [
        (step, value)
        for step, value in zip(expected["step"], expected["values"]["loss"], strict=True)
        if isinstance(value, str)
    ]
    page.goto(f"/jobs/{failed.id}")
    card = chart(page, "loss")
    note = card.locator(".odd")
    expect(note).to_contain_text(f"{len(bad)} {bad[0][1]}, first in loss at step {bad[0][0]}")
    layer = (failed.error or {})["layer"]
    expect(note.get_by_role("link", name=f"inspect {layer}")).to_have_attribute(
        "href", re.compile(f"/layers/{layer}")
    )
    words = re.compile(rf"{len(bad)} {bad[0][1]}")
    expect(card.get_by_role("img")).to_have_attribute("aria-label", words)
    rows = {str(row["step"]): row["loss"] for row in table_of(card)}
    assert rows[str(bad[0][0])] == bad[0][1]


def test_a_nan_is_marked_in_red_on_the_canvas(page: Page, failed: gh.Job):
    page.goto(f"/jobs/{failed.id}")
    canvas = chart(page, "loss").locator("canvas")
    expect(chart(page, "loss").locator(".odd")).to_be_visible()
    page.wait_for_function(_HAS_RED, arg=canvas.element_handle())
    clean = chart(page, "lr").locator("canvas")
    assert not page.evaluate(_HAS_RED, clean.element_handle())


_HAS_RED = """(canvas) => {
  const probe = document.createElement('i');
  probe.style.color = 'var(--bad)';
  document.body.append(probe);
  const wanted = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
  probe.remove();
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  for (let at = 0; at < data.length; at += 4)
    if (data[at + 3] > 200 && wanted.every((one, place) => Math.abs(one - data[at + place]) < 8))
      return true;
  return false;
}"""


def test_a_job_that_continued_shows_its_findings(page: Page, client: gh.Client, digits: str):
    job = client.jobs.create(spec(digits, "went on", stop={"steps": 50}) | WILD).wait(timeout=120)
    page.goto(f"/jobs/{job.id}")
    found = page.get_by_role("region", name="Findings")
    expect(found).to_contain_text("not finite")
    found.get_by_role("link", name="All findings").click()
    expect(page).to_have_url(re.compile("types=finding"))
    expect(page.locator("tbody tr").first).to_contain_text("finding")


def test_a_best_value_after_nan_is_ignored(page: Page, client: gh.Client, digits: str):
    made = spec(digits, "went on unsaid", stop={"steps": 50}, guards={}) | WILD
    job = client.jobs.create(made).wait(timeout=120)
    summary = job.summary
    lost = summary["loss"]["first_nonfinite_step"]
    best = summary["validation/accuracy"]
    assert not math.isfinite(summary["loss"]["last"])
    assert best["max_step"] > lost
    assert isinstance(best["max"], float)
    expect(page.locator(f"tr[data-job={job.id}]")).to_contain_text("none before NaN")
    page.goto(f"/jobs/{job.id}")
    tile = page.get_by_role("listitem").filter(has_text="validation/accuracy")
    expect(tile.locator("b")).to_have_text("none")
    expect(tile).to_contain_text(f"at step {best['max_step']} does not count")
    expect(tile).to_contain_text(f"loss is NaN or Inf from step {lost}")
    expect(page.locator("header.head")).to_contain_text(f"loss is NaN or Inf from step {lost}")
    early = page.get_by_role("listitem").filter(has_text=re.compile("^loss, min"))
    expect(early.locator("b")).to_have_text(re.compile(r"^\d"))
    expect(early).to_contain_text(f"at step {summary['loss']['min_step']}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_failure_has_no_serious_axe_findings(
    page: Page, failed: gh.Job, axe: Axe, screenshot: Screenshot, scheme: str
):
    page.goto(f"/jobs/{failed.id}")
    page.get_by_label("Theme").select_option(scheme)
    expect(chart(page, "loss").locator(".odd")).to_be_visible()
    axe(page)
    page.goto(f"/jobs/{failed.id}/logs")
    expect(page.get_by_role("log")).to_be_visible()
    axe(page)
    if scheme == "light":
        page.get_by_label("Theme").select_option("system")
        page.goto(f"/jobs/{failed.id}")
        expect(chart(page, "loss").locator(".odd")).to_be_visible()
        screenshot("job-failed")


def test_inside_reports_that_no_probe_sampled_the_failed_step(
    page: Page, client: gh.Client, digits: str
):
    guards = {"nonfinite": {"check": ["loss"], "action": "fail"}}
    seldom = [{"layers": ["*"], "kinds": ["output"], "every": 1000}]
    job = client.jobs.create(spec(digits, "unwatched", guards=guards, probes=seldom) | WILD)
    with pytest.raises(gh.JobFailed):
        job.wait(timeout=120)
    step = (job.refresh().error or {})["step"]
    page.goto(f"/jobs/{job.id}/inside")
    expect(page.get_by_role("note")).to_contain_text(f"failed at step {step}")
    expect(page.get_by_role("note")).to_contain_text("newest statistics are of step 0")
