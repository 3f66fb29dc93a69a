"""The datasets: uploading, rejected files, rows, and deleting."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from playwright.sync_api import Page, expect

import glasshouse as gh
from tests.page.browser import Screenshot, Witness
from tests.page.endless import endless, running

Axe = Callable[[Page], None]
PIXELS = """(canvas) => {
  const {width, height} = canvas;
  return [...canvas.getContext("2d").getImageData(0, 0, width, height).data];
}"""


def upload(page: Page, path: Path) -> None:
    page.goto("/datasets")
    page.get_by_label("File").set_input_files(path)
    page.get_by_role("button", name="Upload").click()


def test_a_file_is_uploaded_and_its_columns_and_rows_are_those_of_the_api(
    page: Page, client: gh.Client, tmp_path: Path
):
    path = tmp_path / "birds.csv"
    rows = [f"{'Adelie' if at % 3 else 'Gentoo'},{at / 2},{at}" for at in range(50)]
    path.write_text("\n".join(["species,length,number", *rows]))
    upload(page, path)
    page.get_by_role("link", name="birds.csv").click()
    (dataset,) = [one for one in client.datasets.list() if one.data["name"] == "birds.csv"]
    expect(page).to_have_url(re.compile(f"/datasets/{dataset.id}"))
    columns = page.locator("section", has=page.get_by_role("heading", name="Columns"))
    expect(columns.locator("tbody tr")).to_have_count(3)
    figures = columns.locator("tbody tr", has_text="length").locator("td").all_inner_texts()
    assert figures[1:6] == ["float64", "scalar", "0", "24.5", "12.25"]
    balance = page.get_by_role("table", name="Values of species").locator("tr")
    expect(balance).to_have_count(2)
    assert [row.inner_text().split() for row in balance.all()] == [
        ["Adelie", "33", "66.0", "%"],
        ["Gentoo", "17", "34.0", "%"],
    ]
    page.get_by_role("button", name="Next").click()
    expect(page).to_have_url(re.compile("offset=20"))
    expect(page.get_by_role("table", name="Rows from 20")).to_be_visible()
    first = page.get_by_role("table", name="Rows from 20").locator("tbody tr").first
    assert first.inner_text().split() == ["20", "Adelie", "10", "20"]
    page.reload()
    expect(page.get_by_role("table", name="Rows from 20")).to_be_visible()


def test_a_bad_row_is_reported_with_its_line_and_the_dataset_cannot_be_used(
    page: Page, tmp_path: Path
):
    path = tmp_path / "crooked.csv"
    path.write_text("a,b\n1,2\n3\n4,5\n")
    upload(page, path)
    row = page.get_by_role("row", name="crooked.csv")
    expect(row).to_contain_text("failed")
    expect(row.locator(".wrong")).to_contain_text("line 3")
    expect(row.get_by_role("link", name=re.compile("Train"))).to_have_count(0)
    row.get_by_role("link", name="crooked.csv").click()
    expect(page.get_by_role("alert")).to_contain_text("line 3 has 1 cells")


def test_a_rejected_file_shows_the_reason(page: Page, witness: Witness, tmp_path: Path):
    witness.expect("status of 422")
    path = tmp_path / "nothing.csv"
    path.write_text("")
    upload(page, path)
    expect(page.get_by_role("alert")).to_contain_text("empty")
    path = tmp_path / "unknown.xyz"
    path.write_text("x")
    page.get_by_label("File").set_input_files(path)
    expect(page.get_by_text("Select one")).to_be_visible()
    expect(page.get_by_role("button", name="Upload")).to_be_disabled()


def test_images_are_drawn_as_they_are(page: Page, http: httpx2.Client, digits: str):
    page.goto(f"/datasets/{digits}?split=test")
    asked = {"split": "test", "limit": 20}
    rows = http.get(f"/datasets/{digits}/rows", params=asked).json()["data"]
    figures = http.get(f"/datasets/{digits}/stats").json()["splits"]["test"]["image"]
    assert (figures["min"], figures["max"]) == (0, 1)
    for at in (0, 19):
        canvas = page.get_by_role("img", name=f"image of row {at}", exact=True)
        expect(canvas).to_be_visible()
        pixels = canvas.evaluate(PIXELS)
        values = [value for line in rows[at]["image"][0] for value in line]
        assert len(pixels) == 4 * len(values)
        assert pixels[::4] == pixels[1::4] == pixels[2::4]
        assert pixels[3::4] == [255] * len(values)
        assert pixels[::4] == pytest.approx([255 * value for value in values], abs=0.51)


def test_a_large_color_image_is_drawn_completely(page: Page, tmp_path: Path):
    path = tmp_path / "colors.npz"
    images = np.random.default_rng(1).integers(0, 256, (2, 3, 20, 30), dtype=np.uint8)
    np.savez(path, image=images)
    upload(page, path)
    page.get_by_role("link", name="colors.npz").click()
    canvas = page.get_by_role("img", name="image of row 1", exact=True)
    expect(canvas).to_be_visible()
    pixels = np.array(canvas.evaluate(PIXELS)).reshape(20, 30, 4)
    assert (pixels[..., :3] == images[1].transpose(1, 2, 0)).all()


def test_lengths_of_sequences_are_counted(page: Page, tmp_path: Path):
    path = tmp_path / "words.jsonl"
    lines = [f'{{"ids": {list(range(length))}}}' for length in (1, 2, 2, 4)]
    path.write_text("\n".join(lines))
    upload(page, path)
    page.get_by_role("link", name="words.jsonl").click()
    bars = page.get_by_role("table", name="Lengths of ids").locator("tr")
    expect(bars).to_have_count(4)
    counted = [row.inner_text().split()[:2] for row in bars.all()]
    assert counted == [["1", "1"], ["2", "2"], ["3", "0"], ["4", "1"]]


def test_a_dataset_can_be_deleted_only_after_its_jobs_have_ended(
    page: Page, witness: Witness, client: gh.Client
):
    witness.expect("status of 409")
    rows = "".join(f"{at},{at % 10}\n" for at in range(50))
    dataset = client.datasets.upload(f"x,label\n{rows}".encode(), name="to delete", format="csv")
    fields = {"image": {"type": "dense", "columns": ["x"]}, "label": {"type": "integer", "dim": 10}}
    source = {"dataset": dataset.id, "split": "all"}
    data = {"train": source, "fields": fields, "batch_size": 10}
    page.goto(f"/datasets/{dataset.id}")
    with running(client.jobs.create(endless(dataset.id, "reads it", data=data))):
        delete(page)
        expect(page.locator(".toast.bad")).to_contain_text("A job that has not ended uses this")
        assert client.datasets.get(dataset.id).id == dataset.id
    delete(page)
    expect(page).to_have_url(re.compile("/datasets$"))
    assert dataset.id not in [one.id for one in client.datasets.list()]


def delete(page: Page) -> None:
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_datasets_have_no_serious_axe_findings(
    page: Page, axe: Axe, digits: str, size: tuple[int, int], scheme: Any, screenshot: Screenshot
):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.goto("/datasets")
    expect(page.get_by_role("table", name="Datasets")).to_be_visible()
    axe(page)
    is_pictured = scheme == "light" and size[0] > 1000
    if is_pictured:
        screenshot("datasets")
    page.goto(f"/datasets/{digits}")
    expect(page.get_by_role("img", name="image of row 0", exact=True)).to_be_visible()
    axe(page)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= size[0]
    if is_pictured:
        screenshot("dataset")


def test_the_state_beside_a_heading_is_smaller_than_the_heading(page: Page, digits: str):
    page.goto(f"/datasets/{digits}")
    heading = page.get_by_role("heading", level=1)
    size = "(it) => parseFloat(getComputedStyle(it).fontSize)"
    badge = heading.locator(".badge")
    assert badge.evaluate(size) < 0.75 * heading.evaluate(size)


def test_a_detected_header_is_noted_and_can_be_set_in_the_form(page: Page, client: gh.Client):
    table = b"text,sentiment\na fine film,pos\nit is dull,neg\nI laughed,pos\n"
    guessed = client.datasets.upload(table, name="reviews", format="csv")
    page.goto(f"/datasets/{guessed.id}")
    expect(page.get_by_role("note")).to_contain_text("header")
    page.goto("/datasets")
    chosen = {"name": "reviews.csv", "mimeType": "text/csv", "buffer": table}
    page.get_by_label("File", exact=True).set_input_files(chosen)
    page.get_by_label("First row").select_option("data")
    with page.expect_response(lambda it: it.request.method == "POST") as sent:
        page.get_by_role("button", name="Upload").click()
    made = client.datasets.get(sent.value.json()["id"]).wait()
    assert (made.header, made.splits) == (False, {"all": 4})
