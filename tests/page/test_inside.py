"""The Inside view of a job shows the same values as the API."""

import math
import re
from typing import Any, Final

import httpx2
import numpy as np
import pytest
from playwright.sync_api import Locator, Page, expect

import glasshouse as gh
from tests.acceptance.services import LocalService
from tests.acceptance.specs import lasting, small
from tests.page.browser import SIZES, Screenshot, Witness, drawn

CONV: Final[list[dict[str, Any]]] = [
    {"name": "conv1", "type": "Conv2d", "args": {"out_channels": 8, "kernel_size": 3}},
    {"name": "relu1", "type": "ReLU"},
    {"name": "conv2", "type": "Conv2d", "args": {"out_channels": 8, "kernel_size": 1}},
    {"name": "sum", "type": "add", "inputs": ["relu1", "conv2"]},
    {"name": "flat", "type": "Flatten"},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]
NAMES = [layer["name"] for layer in CONV]
WATCHED = ["output", "output_grad", "param", "param_grad", "update"]
NUM_BLOCKS = 10
PER_BLOCK = 100


@pytest.fixture(scope="module")
def seen(client: gh.Client, digits: str) -> gh.Job:
    """A job with statistics of all layers but ``sum``, and some captures."""
    layers = ["conv*", "relu1", "flat", "fc*"]
    figures: dict[str, Any] = {"layers": layers, "kinds": WATCHED, "every": 5}
    figures |= {"want": ["stats", "histogram"], "max_overhead": None}
    kept = {"layers": ["conv1", "loss.rows"], "kinds": ["output"], "every": 10, "want": ["full"]}
    spec = small(digits, name="seen", network={"layers": CONV}, stop={"steps": 31})
    job = client.jobs.create(spec | {"probes": [figures, kept | {"max_overhead": None}]})
    return job.wait(timeout=120)


@pytest.fixture(scope="module")
def broken(client: gh.Client, digits: str) -> gh.Job:
    """A job whose loss becomes NaN and that continues."""
    probe: dict[str, Any] = {"layers": ["*"], "kinds": ["output", "param"], "every": 1}
    probe |= {"want": ["stats", "full"], "max_overhead": None}
    network = {"layers": CONV}
    spec = small(digits, name="broken", network=network, stop={"steps": 6}, probes=[probe])
    spec["optimizer"] = {"type": "SGD", "args": {"lr": 1e18}}
    return client.jobs.create(spec).wait(timeout=120)


@pytest.fixture(scope="module")
def deep(client: gh.Client, digits: str) -> gh.Job:
    """A job with a little over a thousand layers."""
    layers: list[dict[str, Any]] = [
        {"name": "flat", "type": "Flatten"},
        {"name": "stem", "type": "Linear", "args": {"out_features": 4}},
    ]
    for number in range(NUM_BLOCKS * PER_BLOCK):
        kind = "Linear" if number % 10 == 0 else "ReLU" if number % 10 == 5 else "Identity"
        layer = {"name": f"block{number // PER_BLOCK}_{kind.lower()}{number}", "type": kind}
        layers.append(layer | ({"args": {"out_features": 4}} if kind == "Linear" else {}))
    layers.append({"name": "fc", "type": "Linear", "args": {"out_features": 10}})
    probe = {"layers": ["*"], "kinds": ["output", "param", "param_grad"], "at": [0, 2]}
    spec = small(digits, name="deep", network={"layers": layers}, stop={"steps": 3})
    return client.jobs.create(spec | {"probes": [probe]}).wait(timeout=300)


def inside(page: Page, job: gh.Job, query: str = "") -> None:
    page.goto(f"/jobs/{job.id}/inside{query}")


def cell(page: Page, layer: str, column: str) -> Locator:
    return page.locator(f"tr[data-layer={layer}] td[data-of={column}]")


def shown(place: Locator) -> float | None:
    text = place.get_attribute("data-value")
    return float(text) if text else None


def layers_of(http: httpx2.Client, job: gh.Job) -> dict[str, dict[str, Any]]:
    return {layer["name"]: layer for layer in http.get(f"/jobs/{job.id}/layers").json()["data"]}


def norm(layer: dict[str, Any], kind: str) -> float | None:
    """The L2 norm over all parameters together."""
    found = [kinds[kind]["l2"] for kinds in layer["tensors"].values() if kind in kinds]
    return math.hypot(*found) if found else None


def test_the_table_shows_the_statistics_of_every_layer(
    page: Page, seen: gh.Job, http: httpx2.Client
):
    inside(page, seen)
    expect(page.locator("tr.layer-row")).to_have_count(len(CONV))
    for name, layer in layers_of(http, seen).items():
        output = layer["stats"].get("output", {})
        for column in ("mean", "std", "zeros"):
            assert shown(cell(page, name, column)) == output.get(column), (name, column)
        assert shown(cell(page, name, "parameters")) == layer["parameters"]
        pairs = {
            column: norm(layer, kind)
            for column, kind in (("grad", "param_grad"), ("weight", "param"))
        }
        pairs["nan"] = 0 if layer["stats"] else None
        update = norm(layer, "update")
        ratio = None if update is None else math.log10(update / (norm(layer, "param") or 1))
        for column, value in (pairs | {"ratio": ratio}).items():
            assert shown(cell(page, name, column)) == (value and pytest.approx(value)), (
                name,
                column,
            )
    row = page.locator("tr[data-layer=sum]")
    expect(row).to_contain_text("not watched")


def test_an_earlier_step_is_shown_with_its_values(page: Page, seen: gh.Job, http: httpx2.Client):
    inside(page, seen, "?step=10")
    where = "layer=conv1&kind=output&stat=mean,std&from_step=10&to_step=10"
    (series,) = http.get(f"/jobs/{seen.id}/stats?{where}").json()["data"]
    expect(cell(page, "conv1", "mean")).to_have_attribute("data-value", re.compile("."))
    assert shown(cell(page, "conv1", "mean")) == series["values"]["mean"][0]
    assert shown(cell(page, "conv1", "std")) == series["values"]["std"][0]
    page.get_by_role("button", name="Next step").click()
    expect(page).to_have_url(re.compile("step=15"))
    page.get_by_role("button", name="Newest").click()
    newest = layers_of(http, seen)["conv1"]["stats"]["output"]["mean"]
    expect(cell(page, "conv1", "mean")).to_have_attribute("data-value", str(newest))


def test_layers_are_sorted_and_filtered_and_the_url_has_both(
    page: Page, seen: gh.Job, http: httpx2.Client
):
    inside(page, seen)
    page.get_by_role("button", name="Std").click()
    layers = layers_of(http, seen)
    watched = {name: one["stats"]["output"]["std"] for name, one in layers.items() if one["stats"]}
    order = [*sorted(watched, key=lambda name: -watched[name]), "sum"]
    expect(page.locator("tr.layer-row th")).to_have_text(order)
    page.get_by_label("Layers (name or glob)").fill("conv[12], fc")
    chosen = [name for name in order if name in ("conv1", "conv2", "fc")]
    expect(page.locator("tr.layer-row th")).to_have_text(chosen)
    page.reload()
    expect(page.locator("tr.layer-row th")).to_have_text(chosen)
    expect(page.get_by_role("columnheader", name="Std")).to_have_attribute(
        "aria-sort", "descending"
    )


def test_a_health_icon_shows_its_rules_with_their_values_on_focus(page: Page, seen: gh.Job):
    inside(page, seen)
    light = page.locator("tr[data-layer=fc] button.light")
    light.focus()
    tooltip = page.get_by_role("tooltip")
    expect(tooltip).to_contain_text(re.compile(r"Gradient.*norm is [\d.]+"))
    expect(tooltip).to_contain_text(
        re.compile(r"Update to weight.*ratio of their norms in a step is [\d.]+")
    )
    page.keyboard.press("Escape")
    expect(tooltip).to_have_count(0)
    page.locator("tr[data-layer=sum] button.light").hover()
    expect(tooltip).to_contain_text("Dead units: not evaluated; needs Activation")


def test_a_layer_with_nan_shows_how_many_and_its_health_is_a_problem(
    page: Page, broken: gh.Job, http: httpx2.Client
):
    inside(page, broken, "?sort=-nan")
    layer = layers_of(http, broken)["fc"]
    tensors = [layer["stats"], *layer["tensors"].values()]
    count = sum(int(kind["nan"]) for kinds in tensors for kind in kinds.values())
    assert count > 0
    expect(cell(page, "fc", "nan")).to_have_attribute("data-value", str(count))
    expect(cell(page, "fc", "nan")).to_contain_text("✕")
    light = page.locator("tr[data-layer=fc] button.light")
    expect(light).to_have_text(re.compile("✕ problem"))
    light.hover()
    expect(page.get_by_role("tooltip")).to_contain_text(
        re.compile(r"fc \(Activation\) has \d+ NaN")
    )


def test_nan_of_a_captured_tensor_is_counted_and_hatched(page: Page, broken: gh.Job):
    page.goto(f"/jobs/{broken.id}/layers/fc?view=tensor&kind=output&values=1")
    number = 100 * 10
    expect(page.locator("[data-of=nan]")).to_have_text(re.compile(f"{number:,} NaN"))
    expect(page.get_by_role("region", name="Values").locator("td").first).to_have_text("✕ NaN")
    assert {(255, 0, 255), (0, 0, 0)} <= colors(page.get_by_role("img", name=re.compile("image")))


def colors(canvas: Locator) -> set[tuple[int, int, int]]:
    """The colors of a canvas."""
    script = """(it) => {
      const {data} = it.getContext('2d').getImageData(0, 0, it.width, it.height);
      const found = new Set(); for (let n = 0; n < data.length; n += 4)
        if (data[n + 3] === 255) found.add((data[n] << 16) | (data[n + 1] << 8) | data[n + 2]);
      return [...found]; }"""
    found: list[int] = canvas.evaluate(script)
    return {(one >> 16, one >> 8 & 255, one & 255) for one in found}


def test_histograms_are_drawn_with_the_counts_of_the_api(
    page: Page, seen: gh.Job, http: httpx2.Client
):
    page.goto(f"/jobs/{seen.id}/layers/conv1?kind=output&view=histogram&step=15")
    for name in ("Heat map", "Ridges"):
        chart = page.get_by_role("img", name=re.compile(f"^{name}. Activation of conv1 at 7 steps"))
        expect(chart).to_be_visible()
        drawn(page)
        assert len(colors(chart)) > 10, name
    page.get_by_role("button", name="Table").click()
    where = "layer=conv1&kind=output&stat=histogram&bins=64&max_points=100"
    (expected,) = http.get(f"/jobs/{seen.id}/stats?{where}").json()["data"]
    counts = expected["counts"][expected["step"].index(15)]
    cells = page.locator("table[data-step='15'] td[data-of=count]")
    expect(cells).to_have_count(len(counts))
    assert [int(one.get_attribute("data-value") or "") for one in cells.all()] == counts
    assert sum(counts) == 100 * 8 * 6 * 6


def test_feature_maps_are_the_captured_values(page: Page, seen: gh.Job, http: httpx2.Client):
    page.goto(f"/jobs/{seen.id}/layers/conv1?kind=output&view=tensor&step=20")
    page.get_by_label("Example (of 100)").fill("3")
    picture = page.get_by_role("img", name=re.compile("step 20: 8 images of 6 by 6"))
    expect(picture).to_be_visible()
    rows = http.get(f"/jobs/{seen.id}/layers/loss.rows/output?step=20").json()["values"]
    expect(page.locator("[data-of=row]")).to_have_text(f"Row {rows[3]:,} of its split")
    drawn(page)
    assert len(colors(picture)) > 20
    path = f"/jobs/{seen.id}/layers/conv1/output"
    values = np.array(http.get(f"{path}?step=20&slice=3,0").json()["values"])
    for row, column in ((0, 0), (2, 5)):
        picture.hover(position={"x": column * 28 + 14, "y": row * 28 + 14})
        expect(page.locator(".reading").last).to_contain_text(f"[3, 0, {row}, {column}] is")
        text = (
            page.locator(".reading")
            .last.inner_text()
            .split(" is ")[1]
            .replace("\N{MINUS SIGN}", "-")
        )
        assert float(text) == pytest.approx(values[row, column], rel=1e-4)
    with page.expect_download() as started:
        page.get_by_role("link", name="npy").click()
    kept = np.load(started.value.path(), allow_pickle=False)
    assert (kept.shape, started.value.suggested_filename) == ((100, 8, 6, 6), "conv1-output-20.npy")
    np.testing.assert_allclose(kept[3, 0], values, rtol=1e-6)


def test_the_statistics_of_a_tensor_over_steps_are_those_of_the_api(
    page: Page, seen: gh.Job, http: httpx2.Client
):
    page.goto(f"/jobs/{seen.id}/layers/fc?kind=param_grad")
    page.locator("[data-chart=Norms]").get_by_role("button", name="Table").click()
    where = "layer=fc.weight&kind=param_grad&stat=l2"
    (expected,) = http.get(f"/jobs/{seen.id}/stats?{where}").json()["data"]
    rows = page.locator("[data-chart=Norms] tbody tr")
    expect(rows).to_have_count(len(expected["step"]))
    found = [float(row.locator("td").first.get_attribute("data-value") or "") for row in rows.all()]
    assert found == expected["values"]["l2"]
    page.get_by_role("combobox", name="Tensor").select_option("fc.bias")
    expect(page).to_have_url(re.compile("tensor=fc.bias"))
    expect(page.locator("[data-chart=Norms]")).to_be_visible()
    expect(page.get_by_role("combobox", name="Process")).to_have_count(0)


def test_the_values_of_one_process_are_shown_and_the_url_has_its_rank(
    page: Page, client: gh.Client, digits: str, http: httpx2.Client, axe: Any
):
    probe: dict[str, Any] = {"layers": ["fc"], "kinds": ["output"], "every": 1, "ranks": "all"}
    probe |= {"want": ["stats", "histogram", "full"], "max_overhead": None}
    spec = small(digits, name="two", parallel={"processes": 2}, probes=[probe])
    job = client.jobs.create(spec | {"data": {**spec["data"], "batch_size": 50}}).wait(timeout=120)
    page.goto(f"/jobs/{job.id}/layers/fc?kind=output")
    process = page.get_by_role("combobox", name="Process")
    expect(process.locator("option")).to_have_text(["all, merged", "rank 0", "rank 1"])
    chart = page.locator("[data-chart=Norms]")
    for label, query in (("all, merged", ""), ("rank 1", "&rank=1"), ("rank 0", "&rank=0")):
        process.select_option(label=label)
        chart.get_by_role("button", name="Table").click()
        path = f"/jobs/{job.id}/stats?layer=fc&kind=output&stat=l2{query}"
        (expected,) = http.get(path).json()["data"]
        cells = chart.locator("tbody tr td:first-of-type")
        for value, shown_cell in zip(expected["values"]["l2"], cells.all(), strict=True):
            expect(shown_cell).to_have_attribute("data-value", str(value))
    expect(page).to_have_url(re.compile("rank=0"))
    axe(page)
    page.get_by_role("link", name="Histograms").click()
    expect(page).to_have_url(re.compile("rank=0"))
    page.get_by_role("button", name="Table").click()
    expect(page.locator("caption")).to_have_text(re.compile("500 finite values"))
    page.get_by_role("link", name="Values and maps").click()
    expect(page.get_by_text(re.compile("^50 . 10$"))).to_be_visible()
    expect(page.get_by_text(", of rank 0")).to_be_visible()
    process.select_option(label="all, merged")
    expect(page.get_by_text(re.compile("^100 . 10$"))).to_be_visible()


def test_a_rank_without_values_is_watched_with_one_click(
    page: Page, client: gh.Client, digits: str, http: httpx2.Client
):
    job = client.jobs.create(lasting(digits, 1_000_000, name="own", parallel={"processes": 2}))
    try:
        page.goto(f"/jobs/{job.id}/layers/conv1?kind=output&rank=1")
        expect(
            page.get_by_text("of rank 1. A probe with stats and ranks records them")
        ).to_be_visible()
        page.get_by_role("button", name="Watch every step").click()
        expect(page.locator("[data-chart=Norms]")).to_be_visible()
        (probe,) = http.get(f"/jobs/{job.id}/probes").json()["data"]
        assert (probe["layers"], probe["ranks"]) == (["conv1"], [1])
    finally:
        job.cancel()


def test_gradient_flow_shows_the_gradient_of_each_layer(
    page: Page, seen: gh.Job, http: httpx2.Client
):
    inside(page, seen, "?view=gradients")
    chart = page.get_by_role("img", name=re.compile("^Gradient flow.*3 layers"))
    expect(chart).to_be_visible()
    drawn(page)
    assert len(colors(chart)) > 1
    page.get_by_role("button", name="Table").click()
    rows = page.get_by_role("region", name="Gradients").locator("tbody tr")
    expect(rows.locator("th")).to_have_text(["conv1", "conv2", "fc"])
    layers = layers_of(http, seen)
    for row, name in zip(rows.all(), ("conv1", "conv2", "fc"), strict=True):
        assert shown(row.locator("td").first) == pytest.approx(norm(layers[name], "param_grad"))


def test_wide_bars_are_labeled_with_the_names_of_their_layers(page: Page, seen: gh.Job):
    page.add_init_script(_OVERHEARD)
    inside(page, seen, "?view=gradients")
    for layer in ("conv1", "conv2", "fc"):
        page.wait_for_function("(name) => window.written.includes(name)", arg=layer)


_OVERHEARD = """(() => {
  window.written = [];
  const { fillText } = CanvasRenderingContext2D.prototype;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
    window.written.push(text);
    return fillText.call(this, text, ...rest);
  };
})()"""


def test_the_graph_stays_visible_in_a_window_that_becomes_narrow(page: Page, seen: gh.Job):
    """Like a phone that is rotated."""
    page.set_viewport_size({"width": 1280, "height": 800})
    inside(page, seen, "?view=graph")
    expect(page.locator(".graph .box")).to_have_count(len(CONV) + 1)
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_function(_ALL_WITHIN)


_ALL_WITHIN = """() => {
  const graph = document.querySelector('.graph').getBoundingClientRect();
  const middles = [...document.querySelectorAll('.graph .box')].map((box) => {
    const { left, right } = box.getBoundingClientRect();
    return (left + right) / 2;
  });
  return graph.width < 390 && middles.every((x) => graph.left < x && x < graph.right);
}"""


def test_the_graph_has_every_layer_and_links_to_it(page: Page, seen: gh.Job):
    inside(page, seen, "?view=graph")
    boxes = page.locator(".graph .box")
    expect(boxes).to_have_count(len(CONV) + 1)
    expect(page.locator(".graph path.edge")).to_have_count(7)
    tops = {name: page.get_by_role("link", name=re.compile(f"^{name}, ")) for name in NAMES}
    page.get_by_role("group", name=re.compile("^Graph")).focus()
    places = {name: box.bounding_box() for name, box in tops.items()}
    heights = {name: place["y"] for name, place in places.items() if place}
    assert heights["conv1"] < heights["relu1"] < heights["conv2"] < heights["sum"]
    page.keyboard.press("ArrowDown")
    drawn(page)
    moved = tops["conv1"].bounding_box()
    assert moved is not None
    assert moved["y"] == pytest.approx(heights["conv1"] - 60, abs=2)
    tops["conv2"].click()
    expect(page).to_have_url(re.compile("/layers/conv2$"))
    expect(page.get_by_role("heading", level=1)).to_have_text("conv2")


def test_a_probe_attached_to_a_running_job_records_values(
    page: Page, client: gh.Client, digits: str, http: httpx2.Client, witness: Witness
):
    witness.expect(r"422 .*dry_run")
    job = client.jobs.create(lasting(digits, 1_000_000, name="long"))
    try:
        _attach_and_see(page, job, http)
    finally:
        job.cancel()


def _attach_and_see(page: Page, job: gh.Job, http: httpx2.Client) -> None:
    inside(page, job)
    expect(page.locator(".head .badge").first).to_have_text("running")
    page.get_by_role("link", name="Watch conv2").click()
    form = page.get_by_role("form", name="Attach a probe")
    form.get_by_label("Layers or parameters").fill("nothing*")
    expect(form.get_by_role("alert")).to_contain_text("nothing*")
    form.get_by_label("Layers or parameters").fill("conv2")
    form.get_by_label("Interval (steps)").fill("1")
    form.get_by_label("Budget").fill("")
    estimate = form.locator("[data-of=estimate]")
    expect(estimate).to_contain_text("Matches 3 names")
    expect(estimate).to_contain_text("conv2.weight")
    assert http.get(f"/jobs/{job.id}/probes").json()["data"] == []
    form.get_by_role("button", name="Attach", exact=True).click()
    row = page.locator("tr[data-probe]")
    expect(row).to_contain_text("active")
    expect(row.locator("[data-of=cost]")).to_contain_text("measured")
    (probe,) = http.get(f"/jobs/{job.id}/probes").json()["data"]
    assert (probe["layers"], probe["every"], probe["max_overhead"]) == (["conv2"], 1, None)
    expect(row.locator("[data-of=applied]")).to_have_text(f"{probe['applied_step']:,}")
    events = http.get(f"/jobs/{job.id}/events?types=probe").json()["data"]
    assert [(one["action"], one["step"]) for one in events] == [("attached", probe["applied_step"])]
    page.goto(f"/jobs/{job.id}/layers/conv2?kind=output&range=0~{probe['applied_step'] + 1}")
    chart = page.locator("[data-chart=Norms]")
    chart.get_by_role("button", name="Table").click()
    first = chart.locator("tbody th").first
    expect(first).to_be_visible()
    assert 0 <= int(first.inner_text()) - probe["applied_step"] <= 2
    inside(page, job, "?view=probes")
    row.get_by_role("button", name="Change").click()
    form = page.get_by_role("form", name="Change a probe")
    form.get_by_label("Interval (steps)").fill("64")
    form.get_by_role("button", name="Save").click()
    expect(row.locator("[data-of=when]")).to_have_text("every 64 steps")
    row.get_by_role("button", name="Detach").click()
    expect(row).to_contain_text("removed")
    assert http.get(f"/jobs/{job.id}/probes").json()["data"] == []


def test_the_probe_form_takes_the_focus_and_returns_it(page: Page, client: gh.Client, digits: str):
    job = client.jobs.create(lasting(digits, 1_000_000, name="by keys"))
    try:
        inside(page, job, "?view=probes")
        opener = page.get_by_role("button", name="Attach a probe")
        opener.focus()
        page.keyboard.press("Enter")
        form = page.get_by_role("form", name="Attach a probe")
        expect(form.get_by_label("Layers or parameters")).to_be_focused()
        page.keyboard.press("Escape")
        expect(form).to_have_count(0)
        expect(opener).to_be_focused()
    finally:
        job.cancel()


def test_a_missing_capture_is_watched_with_one_click(
    page: Page, client: gh.Client, digits: str, http: httpx2.Client
):
    job = client.jobs.create(lasting(digits, 1_000_000, name="click"))
    try:
        page.goto(f"/jobs/{job.id}/layers/conv1?kind=param&view=tensor")
        expect(page.locator("header.card .badge")).to_have_text("running")
        page.get_by_role("button", name="Watch every 50 steps").click()
        expect(page.get_by_role("img", name=re.compile("32 images of 3 by 3"))).to_be_visible()
        (probe,) = http.get(f"/jobs/{job.id}/probes").json()["data"]
        assert (probe["layers"], probe["want"]) == (["conv1.weight"], ["full"])
    finally:
        job.cancel()


def test_a_thousand_layers_are_visible_rows_and_groups_in_the_graph(
    page: Page, deep: gh.Job, http: httpx2.Client, screenshot: Screenshot
):
    asked: list[str] = []
    page.on("request", lambda it: asked.append(it.url) if "/stats" in it.url else None)
    inside(page, deep)
    table = page.get_by_role("table")
    expect(table).to_have_attribute("aria-rowcount", str(NUM_BLOCKS * PER_BLOCK + 4))
    expect(page.locator("tr.layer-row .spark").first).to_be_visible()
    assert page.locator("tr.layer-row").count() < 60
    assert len(asked) == 1
    screenshot("inside-deep")
    page.get_by_role("button", name="Weights").click()
    layers = layers_of(http, deep)
    norms = {name: norm(layer, "param") or 0 for name, layer in layers.items()}
    largest = max(norms, key=lambda name: norms[name])
    expect(page.locator("tr.layer-row th").first).to_have_text(largest)
    page.get_by_role("button", name="Weights").click()
    page.get_by_role("region", name="Layers").evaluate("it => it.scrollTo(0, it.scrollHeight)")
    unweighted = [name for name, layer in layers.items() if not layer["parameters"]]
    expect(page.locator("tr.layer-row th").last).to_have_text(unweighted[-1])
    inside(page, deep, "?view=graph")
    expect(page.locator(".graph .box")).to_have_count(NUM_BLOCKS + 4)
    page.get_by_role("button", name=re.compile(r"^block3_\*, 100 layers")).press("Enter")
    expect(page.locator(".graph .box")).to_have_count(NUM_BLOCKS + 3 + PER_BLOCK)
    expect(page.get_by_role("link", name=re.compile("^block3_linear300, Linear"))).to_be_visible()


LONG_TASKS = """
window.tasks = [];
new PerformanceObserver((list) => list.getEntries().forEach((it) => tasks.push(it.duration)))
  .observe({type: 'longtask', buffered: true});
"""


@pytest.mark.slow
def test_a_thousand_layers_never_block_the_page_for_200_ms(page: Page, deep: gh.Job):
    page.add_init_script(LONG_TASKS)
    inside(page, deep)
    expect(page.locator("tr.layer-row .spark").first).to_be_visible()
    for name in ("Std", "Weights", "Health", "Layer", "Zeros"):
        page.get_by_role("button", name=name, exact=True).click()
        expect(page.get_by_role("columnheader", name=name)).not_to_have_attribute(
            "aria-sort", "none"
        )
    region = page.get_by_role("region", name="Layers")
    for place in range(0, 30_000, 3_000):
        region.evaluate(f"it => it.scrollTo(0, {place})")
    page.get_by_role("link", name="Graph").click()
    expect(page.locator(".graph .box")).to_have_count(NUM_BLOCKS + 4)
    longest = max(page.evaluate("tasks"), default=0)
    print(f"longest task: {longest:.0f} ms")  # noqa: T201 (shown with -s)
    assert longest < 200


def test_the_inside_views_have_no_serious_axe_findings(
    page: Page, seen: gh.Job, broken: gh.Job, axe: Any, screenshot: Screenshot
):
    of = f"/jobs/{seen.id}"
    views = {
        "inside-layers": f"{of}/inside?sort=-health",
        "inside-graph": f"{of}/inside?view=graph",
        "inside-gradients": f"{of}/inside?view=gradients",
        "inside-probes": f"{of}/inside?view=probes",
        "layer-steps": f"{of}/layers/conv1",
        "layer-histograms": f"{of}/layers/conv1?view=histogram",
        "layer-maps": f"{of}/layers/conv1?view=tensor&values=1",
        "inside-nan": f"/jobs/{broken.id}/inside",
    }
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for path in views.values():
            page.goto(path)
            expect(page.locator("main .card, main .table, main .graph").first).to_be_visible()
            expect(page.locator("main p[role=status]", has_text="…")).to_have_count(0)
            axe(page)
    for name, path in views.items():
        page.goto(path)
        expect(page.locator("main p[role=status]", has_text="…")).to_have_count(0)
        screenshot(name)


def test_an_ended_job_shows_which_probe_to_add_to_a_spec(
    page: Page, seen: gh.Job, local_service: LocalService
):
    page.goto(f"/jobs/{seen.id}/layers/sum?view=histogram")
    expect(page.locator("main")).to_contain_text('"layers":["sum"]')
    page.goto(f"/jobs/{seen.id}/layers/nowhere")
    expect(page.locator("main")).to_contain_text("The network has no layer nowhere")
    assert local_service.url in page.url


def test_the_buttons_of_the_graph_cover_no_layer_initially(
    page: Page, client: gh.Client, digits: str
):
    sizes = {"num_embeddings": 10, "embedding_dim": 10}  # two inputs: the first row is wide
    layers: list[dict[str, Any]] = [
        {"name": "flat", "type": "Flatten", "inputs": ["image"]},
        {"name": "first", "type": "Linear", "args": {"out_features": 10}},
        {"name": "known", "type": "Embedding", "args": sizes, "inputs": ["label"]},
        {"name": "sum", "type": "add", "inputs": ["first", "known"]},
        *({"name": f"relu{number}", "type": "ReLU"} for number in range(12)),
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    spec = small(digits, name="high", network={"layers": layers}, stop={"steps": 1})
    job = client.jobs.create(spec).wait(timeout=120)
    width, height = SIZES["phone"]
    page.set_viewport_size({"width": width, "height": height})
    page.goto(f"/jobs/{job.id}/inside?view=graph")
    expect(page.locator(".graph .box").first).to_be_visible()
    tools = page.locator(".graph .tools").bounding_box()
    boxes = [box.bounding_box() for box in page.locator(".graph .box").all()]
    assert tools is not None
    for box in boxes:
        assert box is not None
        beside = box["x"] + box["width"] <= tools["x"]
        assert beside or box["y"] >= tools["y"] + tools["height"]
