"""The page of a serve job: what it serves, and its requests."""

import re

from playwright.sync_api import Page, expect

import glasshouse as gh
from tests.page.endless import running


def test_a_serve_job_shows_its_models_and_requests(page: Page, client: gh.Client, digits: str):
    layers = [
        {"name": "flat", "type": "Flatten", "inputs": ["image"]},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    trained = client.train(layers, digits, steps=1).wait()
    client.models.publish("paged", trained)
    job = client.serve("paged").wait_ready()
    with running(job):
        page.goto(f"/jobs/{job.id}")
        models = page.get_by_label("Models").first
        expect(models.get_by_role("row", name=re.compile("paged paged:1 0 0"))).to_be_visible()
        for _ in range(3):
            client.predict("paged", {"image": [[[[0.0] * 8] * 8]]})
        answered = models.get_by_role("row", name=re.compile("paged paged:1 3 0"))
        expect(answered).to_be_visible(timeout=30_000)
        expect(page.get_by_text(re.compile(r"^3, now .* per second$"))).to_be_visible()
