import json
from typing import Any

import httpx2
import pytest

from api.schemas import documents
from tests.running import Api, small_job

JSON = {"Content-Type": "application/json"}
TRAVERSALS = [
    "../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "%252e%252e%252fetc",
    "..;/etc/passwd",
    "..%5c..%5cwindows",
    "%2fetc%2fpasswd",
    "file:%2f%2f%2fetc%2fpasswd",
    "%5c%5cserver%5cshare",
    "a%00b",
    "a%0d%0ab",
    "%ff%fe",
    "x" * 5000,
    "'%20OR%201=1",
    "*",
]


@pytest.fixture
def ada(service: Api):
    with service.client(service.key("ada")) as client:
        yield client


def problem(answer: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    """Check that an answer is this problem, with every member and no secrets of the inside."""
    found = answer.json()
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert found["code"] == code
    assert found["type"] == f"/errors/{code}"
    assert found["status"] == status
    assert found["request_id"] == answer.headers["x-request-id"]
    assert found["title"]
    assert "Traceback" not in answer.text
    assert "site-packages" not in answer.text
    return found


@pytest.mark.parametrize(
    "field", ["seed", "data.batch_size", "stop.steps", "optimizer.args.lr", "data.fields.label.dim"]
)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_a_number_that_is_nan_or_inf_is_refused_by_name(
    ada: httpx2.Client, dataset: str, field: str, value: str
):
    spec = small_job(dataset)
    holder: Any = spec
    *path, last = field.split(".")
    for part in path:
        holder = holder[part]
    holder[last] = "@"
    body = json.dumps(spec).replace('"@"', value)
    for path in ("/api/v1/jobs", "/api/v1/plan"):
        found = problem(ada.post(path, content=body, headers=JSON), 422, "invalid_spec")
        assert found["errors"][0]["pointer"] == "/" + field.replace(".", "/")


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"seed": True}, "/seed"),
        ({"seed": "1"}, "/seed"),
        ({"seed": 1.5}, "/seed"),
        ({"seed": -1}, "/seed"),
        ({"seeed": 1}, "/seeed"),
        ({"stop": {"steps": True}}, "/stop/steps"),
        ({"stop": {"steps": 1, "epochs": 1}}, "/stop/steps"),
        ({"priority": 10**9}, "/priority"),
        ({"labels": {"a:b": "c"}}, "/labels/a:b"),
        ({"name": "a\nb"}, "/name"),
        ({"kind": "sweep"}, "/kind"),
        ({"kind": None}, "/kind"),
        ({"network": {"layers": [{"name": "a b", "type": "ReLU"}]}}, "/network/layers/0/name"),
        ({"network": {"layers": [{"name": "fc", "typo": 1}]}}, "/network/layers/0/type"),
        ({"loss": {"type": "NoSuchLoss", "inputs": ["fc", "label"]}}, "/loss/type"),
        ({"optimizer": {"type": "SGD", "args": {"lrr": 1}}}, "/optimizer/args/lrr"),
        (
            {"network": {"layers": [{"name": "fc", "type": "NoSuchLayer"}]}},
            "/network/layers/0/type",
        ),
        (
            {"network": {"layers": [{"name": "fc", "type": "Linear", "inputs": ["nowhere"]}]}},
            "/network/layers/0/inputs/0",
        ),
    ],
)
def test_a_spec_that_is_wrong_names_the_field(
    ada: httpx2.Client, dataset: str, change: dict[str, Any], pointer: str
):
    found = problem(ada.post("/api/v1/jobs", json=small_job(dataset) | change), 422, "invalid_spec")
    assert pointer in [entry["pointer"] for entry in found["errors"]], found


def test_a_layer_that_does_not_fit_is_named_with_both_shapes(ada: httpx2.Client, dataset: str):
    layers = [
        {"name": "flat", "type": "Flatten"},
        {"name": "fc", "type": "Linear", "args": {"in_features": 63, "out_features": 10}},
    ]
    body = small_job(dataset, network={"layers": layers})
    found = problem(ada.post("/api/v1/plan", json=body), 422, "invalid_spec")
    assert "fc" in found["detail"]
    assert "63" in found["detail"]
    assert "64" in found["detail"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("image", {"type": "dense", "shape": [1, 9, 9]}), ("nothing", {"type": "dense"})],
)
def test_a_field_that_the_data_does_not_have_is_named(
    ada: httpx2.Client, dataset: str, name: str, value: dict[str, Any]
):
    spec = small_job(dataset)
    spec["data"]["fields"][name] = value
    found = problem(ada.post("/api/v1/jobs", json=spec), 422, "invalid_spec")
    assert any(f"/data/fields/{name}" in entry["pointer"] for entry in found["errors"]), found


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "malformed_json"),
        (b"{", 400, "malformed_json"),
        (b"\xff\xfe", 400, "malformed_json"),
        (b"[" * 100_000, 400, "malformed_json"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, 400, "malformed_json"),
        (b'{"kind":"train","name":"\\ud800"}', 400, "malformed_json"),
        (b'{"kind":"train","seed":' + b"9" * 5000 + b"}", 400, "malformed_json"),
        (b"[]", 422, "invalid_spec"),
        (b"null", 422, "invalid_spec"),
        (b'"train"', 422, "invalid_spec"),
    ],
)
def test_a_body_that_is_not_a_spec_is_a_clear_problem(
    ada: httpx2.Client, body: bytes, status: int, code: str
):
    problem(ada.post("/api/v1/jobs", content=body, headers=JSON), status, code)


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", None])
def test_a_body_of_another_media_type_is_refused(ada: httpx2.Client, media: str | None):
    headers = {} if media is None else {"Content-Type": media}
    problem(ada.post("/api/v1/jobs", content=b"{}", headers=headers), 415, "unsupported_media")


def test_a_body_over_the_limit_is_refused_with_a_length_and_without(ada: httpx2.Client):
    big = b'{"kind":"' + b"x" * 1_100_000 + b'"}'
    for path, media in (("/api/v1/jobs", JSON), ("/api/v1/plan", JSON)):
        problem(ada.post(path, content=big, headers=media), 413, "payload_too_large")
        chunks = (big[at : at + 50_000] for at in range(0, len(big), 50_000))
        problem(ada.post(path, content=chunks, headers=media), 413, "payload_too_large")


@pytest.mark.parametrize("value", TRAVERSALS)
def test_hostile_path_parameters_find_nothing(service: Api, ada: httpx2.Client, value: str):
    canary = service.home / "canary"
    canary.write_text("untouched")
    for template in (
        "/api/v1/jobs/{}",
        "/api/v1/jobs/{}/spec",
        "/api/v1/jobs/{}/cancel",
        "/api/v1/jobs/{}/commands/x",
        "/api/v1/jobs/job_x/commands/{}",
        "/api/v1/datasets/{}",
        "/api/v1/datasets/{}/rows",
        "/api/v1/catalog/{}",
        "/docs/{}",
        "/errors/{}",
    ):
        for method in ("GET", "DELETE", "POST"):
            answer = ada.request(method, template.format(value))
            assert 400 <= answer.status_code < 500, (method, template, answer.status_code)
            assert "root:" not in answer.text
    assert canary.read_text() == "untouched"


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("limit=0", 422),
        ("limit=-1", 422),
        ("limit=x", 422),
        ("limit=99999999", 200),
        ("limit=99999999999999999999999", 200),
        ("after=x", 400),
        ("after=job_1%27--", 400),
        ("after=ds_01m7xe4rx5d54q86jy5901qb80", 400),
        ("state=running,queued&state=failed", 200),
        ("state=asleep", 422),
        ("kind=sweep", 422),
        ("label=a:b&label=c:", 200),
        ("label=a", 422),
        ("order=up", 422),
        ("q=%25_%5c", 200),
        ("q=%00", 422),
        ("q=%ff", 200),
        ("parent=x", 200),
    ],
)
def test_list_parameters_are_checked(ada: httpx2.Client, query: str, status: int):
    assert ada.get(f"/api/v1/jobs?{query}").status_code == status


def test_the_allowed_methods_of_a_path_are_listed(ada: httpx2.Client):
    answer = ada.put("/api/v1/jobs/job_x", json={})
    found = problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "DELETE, GET, HEAD, OPTIONS, PATCH"
    assert found["allow"] == ["DELETE", "GET", "HEAD", "OPTIONS", "PATCH"]
    options = ada.options("/api/v1/jobs")
    assert (options.status_code, options.headers["allow"]) == (204, "GET, HEAD, OPTIONS, POST")


def test_the_base_path_says_what_the_service_can(ada: httpx2.Client):
    for path in ("/api/v1", "/api/v1/"):
        found = documents.Service.model_validate_json(ada.get(path).content)
        assert found.version
        assert found.limits["max_json_bytes"] == 1_000_000


@pytest.mark.parametrize("section", ["layers", "losses", "optimizers", "metrics", "presets"])
def test_the_catalog_has_its_sections(ada: httpx2.Client, section: str):
    found = documents.Catalog.model_validate_json(ada.get(f"/api/v1/catalog/{section}").content)
    assert found.section == section
    assert found.entries or section == "presets"
    problem(ada.get("/api/v1/catalog/nothing"), 404, "catalog_not_found")


def test_head_answers_like_get_without_a_body(ada: httpx2.Client):
    get, head = ada.get("/api/v1/catalog/metrics"), ada.head("/api/v1/catalog/metrics")
    assert head.status_code == 200
    assert head.content == b""
    assert head.headers["content-length"] == get.headers["content-length"]


def test_a_request_keeps_a_good_id_and_loses_a_bad_one(ada: httpx2.Client):
    assert ada.get("/livez", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in ("a b", "x" * 65, '"><script>', "é"):
        given = ada.get("/livez", headers={"X-Request-Id": bad.encode()}).headers["x-request-id"]
        assert given.startswith("req_")


def test_every_answer_has_the_security_headers(ada: httpx2.Client):
    for path in ("/api/v1/jobs", "/nothing", "/docs", "/errors/job_not_found"):
        headers = ada.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"
        assert "default-src" in headers["content-security-policy"]
        assert "unsafe-eval" not in headers["content-security-policy"]


def test_an_error_has_a_page(ada: httpx2.Client):
    page = ada.get("/errors/job_not_found")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert ada.get("/errors/no_such_error").status_code == 404


def test_the_log_holds_no_secret_and_one_json_object_a_line(service: Api, ada: httpx2.Client):
    ada.get("/api/v1/jobs?q=a%0aforged%1b[31m", headers={"X-Note": "b\x1b[31m"})
    log = service.log
    assert service.admin not in log
    assert "gh_" not in log
    for line in log.splitlines():
        assert json.loads(line)["event"]
