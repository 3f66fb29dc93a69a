"""The published models: list, versions, try it, traffic, drift, evaluation."""

import io
import json
import re
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Locator, Page, Route, expect

import glasshouse as gh
from tests.acceptance.services import LocalService
from tests.page.browser import Screenshot, Witness, as_on
from tests.page.endless import running
from tests.page.specs import small

Axe = Callable[[Page], None]
HOUSES = "rooms,area,city,price\n" + "".join(
    f"{at % 5 + 1},{20 * (at % 5 + 1) + at % 3},{'Bern' if at % 2 else 'Basel'},{at % 5}\n"
    for at in range(60)
)


@pytest.fixture(scope="module")
def digit_jobs(client: gh.Client, digits: str) -> list[gh.Job]:
    """Two trained networks, with validation rows."""
    spec = small(digits, "digits of models", stop={"epochs": 8})
    spec["optimizer"] = {"type": "Adam", "args": {"lr": 0.01}}
    validation = {"validation": {"dataset": digits, "split": "validation"}}
    spec["data"] = {**spec["data"], **validation}
    spec["evaluate"] = {"every_epochs": 4}
    spec["metrics"] = [{"type": "accuracy", "inputs": ["fc", "label"]}]
    return [client.jobs.create({**spec, "seed": seed}).wait() for seed in (1, 2)]


@pytest.fixture(scope="module")
def house_job(client: gh.Client) -> gh.Job:
    """A network that reads numbers, which may be missing, and a class."""
    dataset = client.datasets.upload(HOUSES.encode(), name="houses.csv", format="csv").wait()
    layers = [
        {"name": "where", "type": "Embedding", "args": {"embedding_dim": 2}, "inputs": ["city"]},
        {"name": "all", "type": "cat", "inputs": ["size", "where"], "args": {"dim": 1}},
        {"name": "fc", "type": "Linear", "args": {"out_features": 1}},
    ]
    fields = {
        "size": {"type": "dense", "columns": ["rooms", "area"], "fill": "mean"},
        "city": {"type": "integer"},
        "price": {"type": "dense", "shape": [1]},
    }
    source = {"dataset": dataset.id, "split": "all"}
    return client.jobs.create(
        {
            "kind": "train",
            "network": {"type": "graph", "layers": layers},
            "loss": {"type": "MSELoss", "inputs": ["fc", "price"]},
            "optimizer": {"type": "SGD", "args": {"lr": 0.00001}},
            "data": {"train": source, "fields": fields, "batch_size": 20},
            "stop": {"epochs": 1},
        }
    ).wait()


@pytest.fixture(scope="module")
def served(client: gh.Client, digit_jobs: list[gh.Job], house_job: gh.Job) -> Generator[gh.Job]:
    """A job that serves the alias production of a model with two versions, and another model."""
    client.models.publish("written", digit_jobs[0], aliases=["production"])
    client.models.publish("written", digit_jobs[1], aliases=["candidate"])
    client.models.publish("houses", house_job)
    job = client.serve(["written@production", "houses"]).wait_ready()
    with running(job):
        yield job


@pytest.fixture
def digit(client: gh.Client, digits: str) -> bytes:
    """A digit as a PNG file."""
    (row,) = client.datasets.rows(digits, split="test", limit=1)
    return png((255 * np.array(row["image"][0])).astype(np.uint8))


def section(page: Page, name: str | re.Pattern[str]) -> Locator:
    return page.get_by_role("region", name=name)


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def chosen(image: bytes, name: str = "digit.png") -> Any:
    return {"name": name, "mimeType": "image/png", "buffer": image}


def shares(result: Locator) -> dict[str, str]:
    """The classes and probabilities that a prediction shows."""
    rows = result.locator("table tr").all()
    return {
        row.locator("th").inner_text(): row.locator("td.number").inner_text().replace(" ", "")
        for row in rows
    }


def test_models_are_listed_with_the_jobs_that_serve_them(page: Page, served: gh.Job):
    page.get_by_role("link", name="Models", exact=True).click()
    row = page.get_by_role("row", name=re.compile("^written"))
    expect(row).to_contain_text("candidate 2, production 1")
    expect(row).to_contain_text("version 1")
    link = row.get_by_role("link", name="written@production")
    expect(link).to_have_attribute("href", f"/jobs/{served.id}")
    row.get_by_role("link", name="written", exact=True).click()
    expect(page).to_have_url(re.compile("/models/written$"))
    versions = section(page, "Versions").locator("tbody tr")
    expect(versions).to_have_count(2)
    expect(versions.nth(1)).to_contain_text("production")
    expect(versions.nth(1).get_by_role("link").last).to_have_attribute("href", f"/jobs/{served.id}")


def test_without_models_the_list_says_how_to_publish_one(
    stranger: Page, client: gh.Client, local_service: LocalService, witness: Witness
):
    key = client.keys.create("no models", ["read"], "somebody")
    with gh.Client(local_service.url, key.data["key"]) as own:
        stranger.goto(own.browser_link())
    stranger.goto("/models")
    ways = section(stranger, "Publish a model")
    for name, text in (
        ("As CLI", "glasshouse models publish"),
        ("As Python", "client.models.publish"),
        ("As curl", "/api/v1/models"),
    ):
        expect(ways.get_by_label(name)).to_contain_text(text)
    witness.expect("status of 404")
    stranger.goto("/models/written")
    expect(stranger.get_by_role("alert")).to_contain_text("No model has the name 'written'")


def test_an_image_is_predicted_as_the_client_predicts_it(
    page: Page, client: gh.Client, served: gh.Job
):
    image = png(np.random.default_rng(3).integers(0, 256, (8, 8), dtype=np.uint8))
    found = client.predict("written@production", rows=[{"image": image}], top_k=10)
    page.goto("/models/written")
    tried = section(page, "Try it")
    tried.get_by_label(re.compile("^image")).set_input_files(chosen(image))
    expect(tried.get_by_role("img", name="image, as it is sent")).to_be_visible()
    tried.get_by_role("button", name="Predict").click()
    result = tried.get_by_label("Prediction")
    names, probs = found["fc/top_k"][0], found["fc/top_k_prob"][0]
    expected = {str(name): f"{100 * prob:.1f}%" for name, prob in zip(names, probs, strict=True)}
    expect(result.locator("strong")).to_have_text(str(names[0]))
    assert shares(result) == dict([*expected.items()][:5])
    result.get_by_role("button", name="Show all 10").click()
    assert shares(result) == expected
    expect(result).to_contain_text(re.compile(r"written:1 answered in [\d.]+ ms \([\d.]+ ms in"))


def test_an_image_of_another_size_is_resized_and_the_page_says_so(page: Page, served: gh.Job):
    page.goto("/models/written")
    tried = section(page, "Try it")
    image = png(np.full((20, 30, 3), 200, np.uint8))
    transfer = page.evaluate_handle(
        """(bytes) => {
          const transfer = new DataTransfer();
          transfer.items.add(new File([new Uint8Array(bytes)], 'gray.png', {type: 'image/png'}));
          return transfer;
        }""",
        [*image],
    )
    tried.locator(".drop").dispatch_event("drop", {"dataTransfer": transfer})
    expect(tried).to_contain_text(re.compile("resized it from 30 . 20 to 8 . 8 pixels"))
    tried.get_by_role("button", name="Predict").click()
    expect(tried.get_by_label("Prediction")).to_contain_text("written:1")
    text = {"name": "x.png", "mimeType": "image/png", "buffer": b"no image"}
    tried.get_by_label(re.compile("^image")).set_input_files(text)  # pyright: ignore[reportArgumentType]
    expect(tried.get_by_role("alert")).to_contain_text("cannot read this file as an image")


def test_random_rows_are_predicted_and_mistakes_are_marked(
    page: Page, client: gh.Client, digits: str, served: gh.Job
):
    page.goto("/models/written")
    tried = section(page, "Try it").get_by_role("group", name="Random rows")
    expect(tried.get_by_label("Split")).to_have_value("validation")
    tried.get_by_label("Split").select_option("train")
    expect(tried).to_contain_text("trained on rows of this split")
    tried.get_by_label("Split").select_option("test")
    lines = tried.locator("tbody tr")
    for _ in range(30):  # until one of them is wrong
        with page.expect_response("**/predict"):
            tried.get_by_role("button", name="Random rows").click()
        expect(tried.get_by_role("button", name="Random rows")).to_be_enabled()
        expect(lines).to_have_count(8)
        if lines.locator(".badge.bad").count() > 0:
            break
    rows = client.datasets.rows(digits, split="test", limit=250)
    hits = 0
    for line in lines.all():
        place = int(line.locator("th").inner_text())
        image, label = rows[place]["image"], rows[place]["label"]
        (best,) = client.predict("written@production", rows=[{"image": image}]).classes
        predicted, prob, truth = (cell.inner_text() for cell in line.locator("td").all()[1:])
        assert str(label) in truth
        assert predicted == str(best)
        assert prob.endswith("%")
        assert ("✕" in truth) == (best != label)
        hits += int(best == label)
        expect(line.get_by_role("img", name=f"image of row {place}")).to_be_visible()
    assert 0 < hits < 8
    expect(tried.get_by_role("status").first).to_contain_text(f"{hits} of 8 correct")


def test_a_row_of_numbers_and_classes_is_predicted_and_errors_are_beside_their_fields(
    page: Page, client: gh.Client, served: gh.Job, witness: Witness
):
    page.goto("/models/houses")
    tried = section(page, "Try it")
    expect(tried.get_by_label("city").locator("option")).to_have_text(
        [re.compile("^.$"), "Basel", "Bern"]
    )
    witness.expect("status of 422")
    tried.get_by_label("rooms").fill("three")
    tried.get_by_role("button", name="Predict").click()
    field = tried.get_by_label("rooms")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_have_accessible_description(re.compile("takes a number, not 'three'"))
    expect(tried.get_by_label("city")).to_have_accessible_description(re.compile("no value"))
    field.fill("3.5")
    tried.get_by_label("city").select_option("Bern")
    tried.get_by_role("button", name="Predict").click()
    row = {"rooms": 3.5, "area": None, "city": "Bern"}
    ((value,),) = client.predict("houses", rows=[row])["fc"]
    shown = tried.get_by_label("Prediction").locator("code")
    expect(shown).to_have_text(re.compile(r"\d"))
    assert float(shown.inner_text().replace("\u2212", "-")) == pytest.approx(float(value), rel=1e-4)
    tried.get_by_role("button", name="Random rows").click()
    expect(tried.locator("tbody tr")).to_have_count(8)
    expect(tried.locator("tbody tr").first).to_contain_text(
        re.compile("rooms.*area.*city", re.DOTALL)
    )


def test_aliases_are_moved_and_removed_and_a_version_is_deleted(
    page: Page, client: gh.Client, digit_jobs: list[gh.Job], witness: Witness
):
    for job in (*digit_jobs, digit_jobs[0]):
        client.models.publish("aliased", job)
    client.models.set_alias("aliased", "production", 1)
    page.goto("/models/aliased")
    row = section(page, "Versions").get_by_role("row")
    page.get_by_role("button", name="Aliases of version 3").click()
    dialog = page.get_by_role("dialog", name="Aliases of version 3")
    dialog.get_by_label("Alias").fill("production")
    expect(dialog).to_contain_text("It moves from version 1")
    dialog.get_by_role("button", name="Move alias").click()
    expect(dialog).to_have_count(0)
    expect(row.nth(1)).to_contain_text("production")
    expect(row.nth(3)).not_to_contain_text("production")
    assert client.models.get("aliased").aliases == {"production": 3}
    expect(page.get_by_role("button", name="Delete version 3")).to_have_count(0)
    page.get_by_role("button", name="Delete version 2").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(row).to_have_count(3)
    assert [one.version for one in client.models.get("aliased").versions] == [3, 1]
    witness.expect("status of 422")
    page.get_by_role("button", name="Aliases of version 1").click()
    dialog = page.get_by_role("dialog", name="Aliases of version 1")
    dialog.get_by_label("Alias").fill("17")
    dialog.get_by_role("button", name="Set alias").click()
    expect(page.locator(".toast.bad")).to_contain_text("has only digits")
    dialog.get_by_label("Alias").press("Escape")
    page.get_by_role("button", name="Aliases of version 3").click()
    page.get_by_role("button", name="Remove the alias production").click()
    expect(row.nth(1)).not_to_contain_text("production")
    assert client.models.get("aliased").aliases == {}


def test_a_model_is_served_with_one_click_and_its_job_is_paused_and_resumed(
    page: Page, client: gh.Client, digit_jobs: list[gh.Job]
):
    client.models.publish("unserved", digit_jobs[0], aliases=["production"])
    page.goto("/models/unserved")
    tried = section(page, "Try it")
    expect(tried.get_by_label("As a command")).to_have_text("glasshouse serve unserved@production")
    expect(section(page, "Traffic")).to_contain_text("No job serves this model")
    tried.get_by_role("button", name="Serve unserved@production").click()
    expect(tried.get_by_role("button", name="Predict")).to_be_visible()
    (served,) = client.models.get("unserved").served_by
    job = client.jobs.get(served["job"])
    with running(job):
        expect(section(page, "Versions")).to_contain_text(job.id[-6:])
        job.wait_ready()
        client.predict("unserved@production", {"image": np.zeros((1, 1, 8, 8), np.float32)})
        answered = section(page, "Traffic").get_by_role("row").nth(1)
        expect(answered).to_contain_text("unserved:1: 1")
        expect(answered).to_contain_text("p50")
        page.goto(f"/jobs/{job.id}")
        page.get_by_role("button", name="Pause").click()
        expect(page.get_by_text("answers no requests")).to_be_visible()
        assert client.jobs.get(job.id).state == "paused"
        expect(page.get_by_role("button", name="Resume")).to_be_visible()
        page.goto("/models/unserved")
        tried.get_by_role("button", name="Resume").click()
        expect(tried.get_by_role("button", name="Resume")).to_have_count(0)
        job.wait_ready()
        page.goto(f"/jobs/{job.id}")
        expect(page.get_by_role("button", name="Pause")).to_be_visible()


def test_a_version_is_evaluated_and_its_confusion_matrix_is_that_of_the_job(
    page: Page, client: gh.Client, served: gh.Job
):
    page.goto("/models/written")
    evaluation = section(page, "Evaluation of written:1")
    expect(evaluation).to_contain_text("no evaluation")
    evaluation.get_by_label("Rows").select_option(label="test")
    evaluation.get_by_role("button", name="Evaluate").click()
    matrix = section(page, "Confusion matrix")
    expect(matrix).to_be_visible()
    job = next(one for one in client.jobs.list(kind="evaluate"))
    counts = job.data["result"]["confusion"]
    shown = [
        [int(cell.split()[0]) for cell in row.locator("td").all_inner_texts()]
        for row in matrix.locator("tbody tr").all()
    ]
    assert shown == counts
    expect(evaluation).to_contain_text("split test, 250 rows")
    expect(evaluation.get_by_role("button", name="Evaluate again")).to_be_visible()
    section(page, "Versions").get_by_role("button", name="Show version 2").click()
    expect(section(page, "Evaluation of written:2")).to_contain_text("no evaluation")
    expect(matrix).to_have_count(0)
    expect(section(page, "Try it")).to_contain_text("No job serves version 2")


SERIES = [
    {"of": "field", "name": "image", "measure": "mean of channel 0", "psi": 0.02}
    | {"threshold": 0.2, "drifted": False},
    {"of": "layer", "name": "fc", "measure": "rms", "psi": 0.9, "threshold": 0.25, "drifted": True},
]


def with_drift(route: Route) -> None:
    """Let the job of a response report drift."""
    headers = {**route.request.headers}
    headers.pop("if-none-match", None)
    answer = route.fetch(headers=headers)
    job = json.loads(answer.text())
    watched = {"model": "written", "version": 1, "state": "watching", "detail": None, "rows": 1000}
    waiting = {"model": "other", "version": 2, "state": "collecting", "rows": 0, "at": None}
    job["serving"]["drift"] = [
        {**watched, "at": "2026-01-01T00:00:00.000Z", "series": SERIES},
        {**waiting, "detail": "400 of 1000 rows", "series": []},
    ]
    route.fulfill(response=answer, json=job)


def test_drift_is_shown_with_the_drifted_series_first(page: Page, served: gh.Job, axe: Axe):
    page.goto("/models/written")
    expect(section(page, "Traffic").get_by_role("row")).to_have_count(2)
    waits = section(page, re.compile("^Drift"))
    expect(waits).to_contain_text("Drift is shown when enough requests have come.")
    page.route(f"**/api/v1/jobs/{served.id}", with_drift)
    drift = section(page, "Drift of written:1")
    expect(drift.get_by_role("heading")).to_contain_text("1 drifted")
    lines = drift.locator("tbody tr")
    expect(lines).to_have_text([re.compile("fc.*rms.*drifted.*0.9.*0.25"), re.compile("normal")])
    expect(section(page, "Drift of other:2")).to_have_count(0)
    axe(page)
    page.goto(f"/jobs/{served.id}")
    expect(section(page, "Drift of other:2")).to_contain_text("400 of 1000 rows")
    page.unroute_all(behavior="ignoreErrors")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_models_have_no_serious_axe_findings(
    page: Page, served: gh.Job, digit: bytes, axe: Axe, scheme: Any, screenshot: Screenshot
):
    page.emulate_media(color_scheme=scheme)
    page.goto("/models")
    expect(page.get_by_role("row", name=re.compile("^written"))).to_be_visible()
    axe(page)
    if scheme == "light":
        screenshot("models")
    page.goto("/models/written")
    tried = section(page, "Try it")
    tried.get_by_label(re.compile("^image")).set_input_files(chosen(digit))
    tried.get_by_role("button", name="Predict").click()
    expect(tried.get_by_label("Prediction")).to_be_visible()
    tried.get_by_role("button", name="Random rows").click()
    expect(tried.locator("table.predictions tbody tr")).to_have_count(8)
    axe(page)
    with as_on(page, "phone"):
        axe(page)
    if scheme == "light":
        screenshot("model", full=True)
