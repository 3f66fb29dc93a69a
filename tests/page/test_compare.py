"""Comparing jobs: lines, settings that differ, and means of groups."""

import re
import statistics

import httpx2
import pytest
from playwright.sync_api import Page, expect

import glasshouse as gh
from tests.page.browser import SIZES, as_on, fits
from tests.page.specs import small

RATES = (0.5, 0.05)
SEEDS = (1, 2)


@pytest.fixture(scope="module")
def sweep(client: gh.Client, digits: str) -> list[gh.Job]:
    """Four jobs: two learning rates, two seeds each."""
    made = [
        client.jobs.create(small(digits, f"rate {lr} seed {seed}", seed=seed, optimizer=sgd(lr)))
        for lr in RATES
        for seed in SEEDS
    ]
    return [job.wait(timeout=120) for job in made]


def sgd(lr: float) -> dict[str, object]:
    return {"type": "SGD", "args": {"lr": lr}}


@pytest.fixture
def compared(page: Page, sweep: list[gh.Job]) -> Page:
    page.goto("/compare?jobs=" + ",".join(job.id for job in sweep))
    expect(page.get_by_role("heading", name="Differences")).to_be_visible()
    expect(page.locator(".line-chart .key > span")).to_have_count(len(sweep))  # all have loaded
    return page


def losses(http: httpx2.Client, job: gh.Job) -> list[float]:
    answer = http.get(f"/jobs/{job.id}/metrics/query", params={"name": "loss"})
    return answer.json()["values"]["loss"]


def table_of(page: Page) -> list[list[str]]:
    """The rows of the chart's table."""
    page.get_by_role("button", name="Table").click()
    body = page.locator(".line-chart tbody")
    expect(body).to_be_visible()
    return [
        [cell.strip() for cell in row.locator("th, td").all_inner_texts()]
        for row in body.locator("tr").all()
    ]


def test_only_settings_that_differ_are_listed(compared: Page, sweep: list[gh.Job]):
    table = compared.get_by_role("table")
    heads = table.get_by_role("columnheader").all_inner_texts()
    assert [head for head in heads if "." in head or head == "seed"] == [
        "seed",
        "optimizer.args.lr",
    ]
    row = compared.locator(f"tr[data-job={sweep[0].id}]")
    expect(row).to_contain_text("0.5")


def test_the_lines_are_the_values_of_the_api(compared: Page, sweep, http: httpx2.Client):
    rows = table_of(compared)
    expected = [losses(http, job) for job in sweep]
    assert len(rows) == len(expected[0])
    for place, row in enumerate(rows):
        shown = [float(cell) for cell in row[1:5]]
        assert shown == pytest.approx([line[place] for line in expected], rel=2e-3)


def test_grouped_jobs_are_drawn_as_their_mean(compared: Page, sweep, http: httpx2.Client):
    compared.get_by_label("Group by").select_option("optimizer.args.lr")
    expect(compared).to_have_url(re.compile("by=optimizer.args.lr"))
    expect(compared.get_by_text("lr = 0.5 (2)")).to_be_visible()
    first, second = (losses(http, job) for job in sweep[:2])
    rows = table_of(compared)
    means = [statistics.fmean(pair) for pair in zip(first, second, strict=True)]
    assert [float(row[1].split()[0]) for row in rows] == pytest.approx(means, rel=2e-3)


def test_a_job_is_removed_and_added_again(compared: Page, sweep: list[gh.Job]):
    compared.get_by_role("button", name="Remove rate 0.5 seed 1").click()
    row = compared.locator(f"tr[data-job={sweep[0].id}]")
    expect(row).to_have_count(0)
    compared.get_by_label("Find a job").fill("rate 0.5 seed 1")
    compared.get_by_label("Add (").select_option(sweep[0].id)
    expect(row).to_be_visible()


def test_comparing_has_no_serious_axe_findings(compared: Page, axe, screenshot):
    axe(compared)
    compared.emulate_media(color_scheme="dark")
    axe(compared)
    screenshot("compare", full=True)


def test_an_empty_selection_explains_how_to_select(page: Page):
    page.goto("/compare")
    expect(page.get_by_text("Add jobs to compare")).to_be_visible()


def test_lines_in_the_table_have_distinct_patterns(compared: Page, sweep: list[gh.Job]):
    lines = compared.locator("td.of-job line")
    expect(lines).to_have_count(len(sweep))
    assert len({line.get_attribute("stroke-dasharray") for line in lines.all()}) == len(sweep)


def test_the_axes_of_settings_and_results_fit_a_phone(compared: Page):
    axes = compared.get_by_role("img", name=re.compile("jobs over seed"))
    for size in ("wide", "phone"):
        with as_on(compared, size):
            compared.wait_for_function(
                "(it) => it.parentElement.scrollWidth <= it.parentElement.clientWidth"
                " && it.clientWidth > 0.5 * it.parentElement.clientWidth",
                arg=axes.element_handle(),
            )
            lines = axes.locator("g > line")
            assert lines.count() >= 3


def test_long_names_do_not_widen_a_phone(page: Page, client: gh.Client, digits: str):
    names = [f"a very long name of a job about the digits number_{n}_" + "x" * 40 for n in (1, 2)]
    jobs = [client.jobs.create(small(digits, name, seed=n)) for n, name in enumerate(names)]
    for job in jobs:
        job.wait(timeout=120)
    width, height = SIZES["phone"]
    page.set_viewport_size({"width": width, "height": height})
    page.goto("/compare?by=seed&jobs=" + ",".join(job.id for job in jobs))
    expect(page.get_by_role("heading", name="Differences")).to_be_visible()
    fits(page)
    page.goto("/compare?jobs=" + ",".join(job.id for job in jobs))
    expect(page.locator(".line-chart .key > span")).to_have_count(2)
    fits(page)
