"""The view of a job: its numbers are those of the API, and its actions change the job."""

import json
import math
import re
from collections.abc import Callable, Generator
from typing import Any

import httpx2
import psutil
import pytest
from playwright.sync_api import Locator, Page, Route, expect

import glasshouse as gh
from tests.acceptance.services import LocalService
from tests.page.browser import Screenshot, Witness
from tests.page.specs import FIELDS, small
from tests.page.tabs import table_of
from tests.waiting import until

STEPS = 240
OVER = ("succeeded", "failed", "cancelled")
Axe = Callable[[Page], None]


def spec(digits: str, name: str, **more: Any) -> dict[str, Any]:
    """A spec with evaluation, metrics and checkpoints."""
    return small(digits, name, **longer(digits)) | more


def longer(digits: str) -> dict[str, Any]:
    """The fields beyond those of the small spec."""
    return {
        "data": {
            "train": {"dataset": digits, "split": "train"},
            "validation": {"dataset": digits, "split": "validation"},
            "fields": FIELDS,
            "batch_size": 32,
        },
        "stop": {"steps": STEPS},
        "evaluate": {"every_epochs": 1},
        "checkpoint": {"every_steps": 100},
        "metrics": [{"type": "accuracy", "inputs": ["fc", "label"]}],
    }


@pytest.fixture(scope="module")
def ended(client: gh.Client, digits: str) -> gh.Job:
    """A job that has ended."""
    return client.jobs.create(spec(digits, "ended one")).wait(timeout=120)


@pytest.fixture
def running(client: gh.Client, digits: str) -> Generator[gh.Job]:
    """A job that trains until it is canceled."""
    job = client.jobs.create(spec(digits, "long one", stop={"steps": 50_000_000}))
    until(lambda: (job.refresh().progress or {}).get("step"), what="a step")
    yield job
    if job.refresh().state not in OVER:
        job.cancel()
    until(lambda: job.refresh().state in OVER, what="the end")


def chart(page: Page, key: str) -> Locator:
    """The card of a chart."""
    return page.locator(f"[data-group='{key}']")


def test_the_table_of_a_chart_has_the_numbers_of_the_api(
    page: Page, ended: gh.Job, http: httpx2.Client
):
    names = ["loss", "validation/loss"]
    expected = http.get(f"/jobs/{ended.id}/metrics/query", params={"name": names}).json()
    page.goto(f"/jobs/{ended.id}")
    shown = table_of(chart(page, "loss"))
    assert [int(str(row["step"])) for row in shown] == expected["step"]
    for name in names:
        values = [None if row[name] is None else float(str(row[name])) for row in shown]
        assert values == expected["values"][name]
    marks = chart(page, "loss").get_by_role("list", name="Marks")
    expect(marks).to_contain_text("step 100: checkpoint of step 100")
    expect(marks).to_contain_text("attempt 1")


def test_the_metrics_of_several_validation_sources_share_a_chart(
    page: Page, client: gh.Client, http: httpx2.Client, digits: str
):
    changed = spec(digits, "two sources", stop={"steps": 80})
    train = changed["data"]["train"]
    changed["data"]["validation"] = {"seen": train, "other": {**train, "split": "test"}}
    job = client.jobs.create(changed).wait(timeout=120)
    names = ["loss", "validation/other/loss", "validation/seen/loss"]
    expected = http.get(f"/jobs/{job.id}/metrics/query", params={"name": names}).json()
    page.goto(f"/jobs/{job.id}")
    shown = table_of(chart(page, "loss"))
    for name in names:
        values = [None if row[name] is None else float(str(row[name])) for row in shown]
        assert values == expected["values"][name]
    page.goto("/jobs")
    best = http.get(f"/jobs/{job.id}").json()["summary"]["validation/seen/accuracy"]["max"]
    row = page.locator(f"tr[data-job={job.id}]")
    expect(row).to_contain_text(f"seen/accuracy {best:.4g}")
    page.goto(f"/submit?from={job.id}")
    validation = page.locator("[id='at/data/validation']").locator("select").first
    expect(validation.locator("option:checked")).to_have_text("by name")
    sources = page.locator("[id='at/data/validation']").get_by_label("name", exact=True)
    assert [sources.nth(place).input_value() for place in range(2)] == ["seen", "other"]


def test_a_chart_has_a_description_and_best_values_are_shown(
    page: Page, ended: gh.Job, http: httpx2.Client
):
    expected = http.get(f"/jobs/{ended.id}/metrics/query", params={"name": "loss"}).json()
    first, last = expected["values"]["loss"][0], expected["values"]["loss"][-1]
    page.goto(f"/jobs/{ended.id}")
    image = chart(page, "loss").get_by_role("img")
    words = rf"loss fell from {first:.4g} to {last:.4g} over {STEPS - 1} steps"
    expect(image).to_have_attribute("aria-label", re.compile(re.escape(words)))
    best = http.get(f"/jobs/{ended.id}").json()["summary"]["validation/accuracy"]
    tile = page.get_by_role("list", name="Best values").get_by_role("listitem").last
    expect(tile).to_contain_text(f"{best['max']:.4g}")
    expect(tile).to_contain_text(f"at step {best['max_step']}")


def test_the_key_that_created_the_job_is_shown(page: Page, ended: gh.Job):
    page.goto(f"/jobs/{ended.id}")
    made = page.locator("header.head, dl.figures").get_by_text(f" by {ended.created_by}")
    expect(made.first).to_be_visible()


def test_a_dragged_range_is_requested_again_and_escape_resets_it(page: Page, ended: gh.Job):
    page.goto(f"/jobs/{ended.id}")
    expect(chart(page, "accuracy").locator(".u-over")).to_be_visible()
    card = chart(page, "loss")
    over = card.locator(".u-over")
    over.hover()  # waits until the layout is stable
    box = over.bounding_box()
    assert box is not None
    with page.expect_request(re.compile(r"metrics/query\?.*from_step=")) as asked:
        page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40, steps=5)
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] - 20, steps=5)  # leaves the chart
        page.mouse.up()
    query = httpx2.URL(asked.value.url).params
    low, high = int(query["from_step"]), int(query["to_step"])
    assert math.isclose(low, STEPS * 0.25, abs_tol=5)
    assert math.isclose(high, STEPS * 0.5, abs_tol=5)
    assert int(query["max_points"]) <= 1000
    expect(page).to_have_url(re.compile(rf"from={low}&to={high}"))
    expect(card.get_by_role("img")).to_have_attribute(
        "aria-label", re.compile(rf"over {high - low} steps")
    )
    page.reload()
    steps = [int(str(row["step"])) for row in table_of(chart(page, "loss"))]
    assert (steps[0], steps[-1]) == (low, high)
    chart(page, "accuracy").get_by_role("img").press("Escape")
    expect(page).not_to_have_url(re.compile("from="))


def test_the_arrow_keys_move_the_cursor(page: Page, ended: gh.Job, http: httpx2.Client):
    expected = http.get(f"/jobs/{ended.id}/metrics/query", params={"name": "lr"}).json()
    page.goto(f"/jobs/{ended.id}")
    card = chart(page, "lr")
    image = card.get_by_role("img")
    expect(card.locator(".u-over")).to_be_visible()
    image.press("Home")
    for _ in range(3):
        image.press("ArrowRight")
    expect(card.get_by_role("status")).to_have_text(f"step 3: lr {expected['values']['lr'][3]:.4g}")
    image.press("End")
    expect(card.get_by_role("status")).to_contain_text(f"step {STEPS - 1}")


def test_the_axis_can_show_epochs_and_times(page: Page, ended: gh.Job):
    page.goto(f"/jobs/{ended.id}?smooth=0.9&log=loss")
    expect(page.get_by_label("smoothing")).to_have_value("0.9")
    expect(chart(page, "loss").get_by_role("button", name="Log")).to_have_attribute(
        "aria-pressed", "true"
    )
    page.get_by_role("combobox", name="x", exact=True).select_option("epoch")
    words = re.compile(r"loss fell .* over 5\.\d+ epochs")  # 240 steps of 32, of 1297 rows
    expect(chart(page, "loss").get_by_role("img")).to_have_attribute("aria-label", words)
    page.get_by_role("combobox", name="x", exact=True).select_option("time")
    words = re.compile(r"loss fell .* over \d+ seconds")
    expect(chart(page, "loss").get_by_role("img")).to_have_attribute("aria-label", words)


def test_a_changed_learning_rate_is_confirmed_with_its_step(
    page: Page, running: gh.Job, http: httpx2.Client, witness: Witness, axe: Axe
):
    witness.expect("status of 422")
    page.goto(f"/jobs/{running.id}")
    page.get_by_role("button", name="Change settings").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("Setting")).to_have_value("optimizer.lr")
    dialog.get_by_label("New value (current: 0.1)").fill("-5")
    dialog.get_by_role("button", name="Apply", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("/set/optimizer.lr")
    dialog.get_by_label("New value").fill("0.025")
    dialog.get_by_role("button", name="Apply", exact=True).click()
    row = dialog.get_by_role("row").last
    axe(page)
    expect(row).to_contain_text("optimizer.lr 0.1 → 0.025")
    expect(row).to_contain_text("applied")
    (command,) = http.get(f"/jobs/{running.id}/commands").json()["data"]
    expect(row.get_by_role("cell").last).to_have_text(f"{command['step']:,}")
    expect(page.locator(".toast").last).to_contain_text(f"from step {command['step']:,}")
    around = {"name": "lr", "from_step": command["step"] - 1, "to_step": command["step"]}
    until(lambda: (running.refresh().progress or {}).get("step", 0) > command["step"] + 1)
    rates = http.get(f"/jobs/{running.id}/metrics/query", params=around).json()
    assert rates["values"]["lr"] == [0.1, 0.025]


def test_a_job_is_paused_resumed_forked_and_canceled(
    page: Page, running: gh.Job, http: httpx2.Client, witness: Witness
):
    page.goto(f"/jobs/{running.id}")
    state = page.locator("header.head [role=status]")
    page.get_by_role("button", name="Checkpoint now").click()
    page.get_by_role("button", name="Pause").click()
    expect(state).to_have_text("paused")
    assert running.refresh().state == "paused"
    page.get_by_role("button", name="Resume").click()
    expect(state).to_have_text("running")

    page.get_by_role("button", name="Fork").click()
    dialog = page.get_by_role("dialog")
    patch = dialog.get_by_label("Changes to the spec")
    witness.expect("status of 422")
    patch.fill('{"stop": {"steps": "many"}}')
    dialog.get_by_role("button", name="Fork", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("/spec/stop/steps")
    patch.fill(json.dumps({"name": "forked", "stop": {"steps": 10**7}}))
    dialog.get_by_role("button", name="Fork", exact=True).click()
    expect(page.get_by_role("heading", name="forked")).to_be_visible()
    forked = page.url.rsplit("/", 1)[1]
    assert http.get(f"/jobs/{forked}").json()["parent"] == running.id
    page.goto(f"/jobs/{forked}/spec?spec=parent")
    changed = page.get_by_role("row").filter(has_text="stop.steps")
    expect(changed).to_contain_text("50000000")
    expect(changed).to_contain_text("10000000")

    for job in (forked, running.id):
        page.goto(f"/jobs/{job}")
        page.get_by_role("button", name="Cancel job").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel job").click()
        expect(state).to_have_text("cancelled")
        assert http.get(f"/jobs/{job}").json()["state"] == "cancelled"


def test_name_and_labels_are_edited_and_an_ended_job_is_deleted(
    page: Page, client: gh.Client, digits: str
):
    job = client.jobs.create(spec(digits, "to go", stop={"steps": 2}, labels={"old": "1"}))
    job.wait(timeout=120)
    page.goto(f"/jobs/{job.id}")
    page.get_by_role("button", name="Edit").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("another name")
    dialog.get_by_label("Labels").fill("team: vision\nurl: http://x:1")
    dialog.get_by_role("button", name="Save").click()
    expect(page.get_by_role("heading", name="another name")).to_be_visible()
    assert job.refresh().data["labels"] == {"team": "vision", "url": "http://x:1"}
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete permanently").click()
    expect(page).to_have_url(re.compile(r"/jobs$"))
    expect(page.get_by_text("Job deleted.")).to_be_visible()
    with pytest.raises(gh.NotFoundError):
        client.jobs.get(job.id)


def test_checkpoints_are_listed_with_their_metrics_and_deleted(
    page: Page, client: gh.Client, digits: str, http: httpx2.Client
):
    job = client.jobs.create(spec(digits, "saved", stop={"steps": 120})).wait(timeout=120)
    first, last = http.get(f"/jobs/{job.id}/checkpoints").json()["data"]
    page.goto(f"/jobs/{job.id}/checkpoints")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("120")
    expect(rows.first).to_contain_text(f"{last['metrics']['validation/accuracy']:.4g}")
    with page.expect_download() as download:
        rows.first.get_by_role("link", name="Weights").click()
    assert download.value.path().stat().st_size == last["files"]["model.safetensors"]["size_bytes"]
    rows.last.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete permanently").click()
    expect(rows).to_have_count(1)
    assert http.get(f"/checkpoints/{first['id']}").status_code == 404


def test_events_are_filtered_by_type(page: Page, ended: gh.Job, http: httpx2.Client):
    page.goto(f"/jobs/{ended.id}/events")
    expected = http.get(f"/jobs/{ended.id}/events", params={"types": "state,checkpoint,end"}).json()
    rows = page.locator("tbody tr")
    numbers = [f"{one['seq']:,}" for one in reversed(expected["data"])]
    for name in ("attempt", "command", "finding", "probe", "adjusted", "stalled", "dropped", "gap"):
        page.get_by_label(name, exact=True).uncheck()
    expect(rows.locator("td:first-child")).to_have_text(numbers)
    page.get_by_label("end", exact=True).uncheck()
    page.get_by_label("checkpoint", exact=True).uncheck()
    expect(page).to_have_url(re.compile("types=state$"))
    expect(rows.first).to_contain_text("running → succeeded")


def test_predictions_show_each_class_and_the_least_confident_rows_first(
    page: Page,
    client: gh.Client,
    ended: gh.Job,
    digits: str,
    http: httpx2.Client,
    screenshot: Screenshot,
):
    data = {"dataset": digits, "split": "test"}
    asked = {"kind": "infer", "job": ended.id, "data": data, "outputs": ["fc"]}
    job = client.jobs.create(asked | {"fields": ["id", "prob"]}).wait(timeout=120)
    expected = http.get(f"/jobs/{job.id}").json()["result"]["fc"]
    probs = expected["prob"]["data"]
    worst = min(range(len(probs)), key=probs.__getitem__)
    page.goto(f"/jobs/{job.id}")
    page.get_by_label("compare with column").select_option("none")
    row = page.locator(".predicted tbody tr").first
    expect(row.get_by_role("rowheader")).to_have_text(str(worst))
    expect(row.get_by_role("cell").first).to_have_text(str(expected["id"]["data"][worst]))
    threes = expected["id"]["data"].count(3)
    expect(page.get_by_role("button", name=f"class 3: {threes}")).to_be_visible()
    pages = http.get(f"/datasets/{digits}/rows", params={"split": "test", "limit": 1000}).json()
    truth = [row["label"] for row in pages["data"]]
    pairs = list(zip(truth, expected["id"]["data"], strict=True))
    wrong = [at for at, (right, said) in enumerate(pairs) if right != said]
    page.get_by_label("compare with column").select_option("label")
    expect(page.get_by_text(f"{len(truth) - len(wrong)} of {len(truth)} rows")).to_be_visible()
    surest = max(wrong, key=probs.__getitem__)
    expect(row.get_by_role("rowheader")).to_have_text(str(surest))
    expect(row.get_by_role("img", name=f"image of row {surest}", exact=True)).to_be_visible()
    screenshot("predictions")
    right, said = pairs[surest]
    cell = f"{pairs.count((right, said))} of class {right} predicted as {said}"
    page.get_by_role("button", name=cell).click()
    rows = page.locator(".predicted tbody tr")
    expect(rows).to_have_count(pairs.count((right, said)))
    with page.expect_download() as download:
        page.get_by_role("link", name="outputs.safetensors").click()
    files = http.get(f"/jobs/{job.id}/artifacts").json()["data"]
    (file,) = (one for one in files if one["name"] == "outputs.safetensors")
    assert download.value.path().stat().st_size == file["size_bytes"]


def test_an_evaluation_shows_metrics_the_confusion_matrix_and_the_worst_samples(
    page: Page, client: gh.Client, ended: gh.Job, digits: str, axe: Axe
):
    data = {"dataset": digits, "split": "test"}
    asked = {"kind": "evaluate", "job": ended.id, "data": data, "by": "label", "worst": 5}
    asked |= {"want": ["confusion", "calibration", "worst_samples"]}
    job = client.jobs.create(asked).wait(timeout=120)
    result = job.result()
    page.goto(f"/jobs/{job.id}")
    metrics = page.get_by_role("region", name="Metrics", exact=True).first
    expect(metrics.get_by_role("rowheader", name="loss", exact=True)).to_be_visible()
    matrix = page.locator(".confusion tbody tr")
    expect(matrix).to_have_count(10)
    cell = matrix.nth(3).get_by_role("cell").nth(3)
    expect(cell).to_contain_text(str(result["confusion"][3][3]))
    share = result["confusion"][3][3] / sum(result["confusion"][3])
    expect(cell).to_contain_text(f"{share * 100:.1f}")
    worst = page.get_by_role("region", name="Worst samples").first.locator("tbody tr")
    expect(worst).to_have_count(5)
    expect(worst.first.get_by_role("cell").first).to_have_text(
        str(result["worst_samples"][0]["row"])
    )
    expect(page.get_by_role("heading", name="By label")).to_be_visible()
    expect(page.get_by_role("link", name="evaluation.json")).to_be_visible()
    axe(page)


def test_predictions_show_class_names(page: Page, client: gh.Client):
    rows = [f"{n},{n % 3},{('fig', 'apple', 'pear')[n % 3]}" for n in range(30)]
    content = "\n".join(["a,b,fruit", *rows]).encode()
    table = client.datasets.upload(content, name="fruit", format="csv")
    trained = client.train(
        [{"name": "fc", "type": "Linear", "args": {"out_features": 3}}],
        table,
        fields={"x": {"type": "dense", "columns": ["a", "b"]}, "fruit": {"type": "integer"}},
        loss={"type": "CrossEntropyLoss", "inputs": ["fc", "fruit"]},
        epochs=2,
        seed=1,
    ).wait(timeout=120)
    data = {"dataset": "fruit", "split": "all"}
    asked = {"kind": "infer", "job": trained.id, "data": data}
    job = client.jobs.create(asked).wait(timeout=120)
    expected = job.result()["fc"]
    pairs = list(
        zip([row.rpartition(",")[2] for row in rows], expected["class"]["data"], strict=True)
    )
    page.goto(f"/jobs/{job.id}")
    expect(page.get_by_label("compare with column")).to_have_value("fruit")
    right = sum(true == said for true, said in pairs)
    expect(page.get_by_text(f"{right} of 30 rows")).to_be_visible()
    headers = page.locator(".confusion thead th")
    classes = sorted({name for pair in pairs for name in pair})
    expect(headers).to_have_text(classes)
    true, said = next(pair for pair in pairs if pair[0] != pair[1])
    cell = f"{pairs.count((true, said))} of class {true} predicted as {said}"
    page.get_by_role("button", name=cell).click()
    expect(page.locator(".predicted tbody tr").first).to_contain_text(f"✕ {true}")


def test_the_spec_is_copied_as_a_complete_command(page: Page, ended: gh.Job):
    page.goto(f"/jobs/{ended.id}")
    page.get_by_role("button", name="Copy as").click()
    text = page.get_by_role("dialog").locator("pre")
    expect(text).to_contain_text("curl")
    body = text.inner_text().split("<<'JSON'\n")[1].split("\nJSON")[0]
    assert json.loads(body)["optimizer"] == {"type": "SGD", "args": {"lr": 0.1}}


def test_an_unavailable_api_is_reported_and_polling_continues_with_correct_numbers(
    page: Page, running: gh.Job, local_service: LocalService, http: httpx2.Client, witness: Witness
):
    page.goto(f"/jobs/{running.id}")
    expect(chart(page, "loss").get_by_role("img")).to_have_attribute(
        "aria-label", re.compile("loss")
    )
    witness.expect("ERR_CONNECTION_REFUSED|ERR_EMPTY_RESPONSE|ERR_CONNECTION_RESET|status of 5")
    api = api_of(local_service)
    api.kill()
    bar = page.locator(".bar")
    expect(bar).to_contain_text("The service is unavailable.")
    expect(bar).to_have_count(0)
    running.pause()
    until(lambda: running.refresh().state == "paused", what="the pause")
    expect(page.locator("header.head [role=status]")).to_have_text("paused")
    expected = http.get(f"/jobs/{running.id}/metrics/query", params={"name": "lr"}).json()
    words = re.compile(rf"over {expected['step'][-1] - expected['step'][0]:,} steps")
    expect(chart(page, "lr").get_by_role("img")).to_have_attribute("aria-label", words)


def api_of(local_service: LocalService) -> psutil.Process:
    """The API process of a service."""
    runtime = json.loads((local_service.home / "runtime.json").read_text())
    above = psutil.Process(runtime["pid"])
    (api,) = [one for one in above.children() if one.cmdline()[1:3] == ["-m", "api"]]
    return api


def test_dialogs_have_no_serious_axe_findings(page: Page, ended: gh.Job, axe: Axe):
    page.goto(f"/jobs/{ended.id}")
    for scheme in ("light", "dark"):
        page.get_by_label("Theme").select_option(scheme)
        for name in ("Fork", "Edit", "Copy as …", "Delete"):
            opener = page.get_by_role("button", name=name, exact=True)
            opener.click()
            expect(page.get_by_role("dialog")).to_be_visible()
            axe(page)
            page.keyboard.press("Escape")
            expect(page.get_by_role("dialog")).to_have_count(0)
            expect(opener).to_be_focused()


@pytest.mark.parametrize("tab", ["", "/logs", "/events", "/checkpoints", "/spec"])
def test_tabs_have_no_serious_axe_findings(
    page: Page, ended: gh.Job, axe: Axe, screenshot: Screenshot, tab: str
):
    page.goto(f"/jobs/{ended.id}{tab}")
    expect(page.locator("nav.tabs [aria-current=page]")).to_be_visible()
    expect(page.locator("main [role=status]").filter(has_text="Loading")).to_have_count(0)
    for scheme in ("light", "dark"):
        page.get_by_label("Theme").select_option(scheme)
        axe(page)
    page.get_by_label("Theme").select_option("system")
    screenshot(f"job{tab.replace('/', '-')}")


@pytest.mark.parametrize(
    ("word", "role", "name"), [("Fork", "combobox", "From"), ("Edit", "textbox", "Name")]
)
def test_a_dialog_focuses_its_first_field_keeps_the_focus_and_returns_it(
    page: Page, ended: gh.Job, word: str, role: Any, name: str
):
    page.goto(f"/jobs/{ended.id}")
    opener = page.get_by_role("button", name=word, exact=True)
    opener.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog").get_by_role(role, name=name, exact=True)).to_be_focused()
    for _ in range(12):
        page.keyboard.press("Tab")
        assert page.evaluate(_WITHIN)
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(opener).to_be_focused()


_WITHIN = """() => {
  const at = document.activeElement; // the body: the focus passes through the browser's toolbar
  return at === document.body || at.closest('dialog') !== null;
}"""


def test_the_cursor_of_a_chart_does_not_shift_the_layout_or_read_later_values(
    page: Page, ended: gh.Job
):
    page.goto(f"/jobs/{ended.id}")
    card = chart(page, "loss")
    image = card.get_by_role("img")
    expect(card.locator(".u-over")).to_be_visible()

    def layout() -> list[tuple[float, float]]:
        """Positions relative to the chart's top, independent of scrolling."""
        found = [one.bounding_box() for one in (card, card.locator(".key"), chart(page, "lr"))]
        boxes = [box for box in found if box is not None]
        return [(box["y"] - boxes[0]["y"], box["height"]) for box in boxes]

    before = layout()
    evaluated = [int(str(row["step"])) for row in table_of(card) if row["validation/loss"]]
    card.get_by_role("button", name="Table").click()
    expect(card.locator(".u-over")).to_be_visible()
    image.press("End")  # at a checkpoint: its name is shown
    expect(card.locator(".cursor-note")).to_contain_text("checkpoint")
    image.press("ArrowLeft")
    assert layout() == before
    older = max(step for step in evaluated if step < STEPS - 2)
    expect(card.locator(".cursor-note")).to_contain_text(f"validation/loss at {older}")
    expect(card.get_by_role("status")).to_contain_text(f"(at step {older})")
    image.press("Home")
    expect(card.locator(".key")).to_contain_text(re.compile("validation/loss \\u2013"))


def test_the_order_of_the_best_values_is_independent_of_the_response(page: Page, ended: gh.Job):
    def turned(route: Route) -> None:
        answer = route.fetch()
        job = answer.json()
        job["summary"] = dict(reversed(job["summary"].items()))
        route.fulfill(response=answer, json=job)

    tiles = page.get_by_role("list", name="Best values").get_by_role("listitem")
    page.goto(f"/jobs/{ended.id}")
    expect(tiles).not_to_have_count(0)
    names = [tile.split("\n")[0] for tile in tiles.all_inner_texts()]
    page.route(re.compile(rf"/api/v1/jobs/{ended.id}$"), turned)
    page.reload()
    expect(tiles).to_have_count(len(names))
    assert [tile.split("\n")[0] for tile in tiles.all_inner_texts()] == names


def test_the_times_of_the_processes_are_those_of_the_api(
    page: Page,
    client: gh.Client,
    http: httpx2.Client,
    digits: str,
    axe: Axe,
    screenshot: Screenshot,
):
    two = {
        "parallel": {"strategy": "data", "processes": 2},
        "devices": {"type": "cpu", "threads": 1},
    }
    job = client.jobs.create(spec(digits, "two processes", **two)).wait(timeout=120)
    metrics = {
        one["name"]: one["last"] for one in http.get(f"/jobs/{job.id}/metrics").json()["data"]
    }
    page.goto(f"/jobs/{job.id}")
    panel = page.get_by_role("region", name="Processes")
    rows = panel.locator("tbody tr")
    expect(rows).to_have_count(2)
    for rank in (0, 1):
        cells = rows.nth(rank).locator("td")
        shown = [float(cell.get_attribute("data-value") or "nan") for cell in cells.all()]
        parts = ("data", "compute", "collective", "step")
        assert shown == [metrics[f"system/ranks/{rank}/{part}_s"] for part in parts]
    spread = panel.locator("tfoot tr")
    for row, name in enumerate(("min", "median", "max")):
        shown_step = spread.nth(row).locator("td").last.get_attribute("data-value")
        assert float(shown_step or "nan") == pytest.approx(metrics[f"system/ranks/step_{name}_s"])
    expect(chart(page, "system/ranks/collective")).to_be_visible()
    expect(page.locator("[data-group='system/ranks/0/data_s']")).to_have_count(0)
    axe(page)
    screenshot("job-processes")


def test_a_job_of_one_process_shows_no_times_of_processes(page: Page, ended: gh.Job):
    page.goto(f"/jobs/{ended.id}")
    expect(chart(page, "loss")).to_be_visible()
    expect(page.get_by_role("region", name="Processes")).to_have_count(0)
