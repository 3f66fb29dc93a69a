"""Keys, retries and errors, against a real server."""

import socket
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import glasshouse as gh
from glasshouse import errors
from tests.stub_api import answer, job, listing, problem

Connect = Callable[..., gh.Client]


class Scripted:
    """Answers with one response after the other and keeps the requests."""

    def __init__(self, *responses: Response) -> None:
        self.responses = list(responses)
        self.requests: list[Request] = []
        self.bodies: list[bytes] = []

    async def __call__(self, request: Request) -> Response:
        self.requests.append(request)
        self.bodies.append(await request.body())
        return self.responses.pop(0)

    def route(self, path: str, *methods: str) -> Route:
        async def endpoint(request: Request) -> Response:
            return await self(request)

        return Route(path, endpoint, methods=list(methods or ("GET",)))


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, gh.BadRequestError),
        (401, gh.AuthenticationError),
        (403, gh.PermissionDeniedError),
        (404, gh.NotFoundError),
        (405, gh.MethodNotAllowedError),
        (406, gh.NotAcceptableError),
        (408, gh.RequestTimeoutError),
        (409, gh.ConflictError),
        (412, gh.PreconditionFailedError),
        (413, gh.PayloadTooLargeError),
        (415, gh.UnsupportedMediaError),
        (418, gh.BadRequestError),
        (422, gh.UnprocessableEntityError),
        (421, gh.MisdirectedRequestError),
        (429, gh.RateLimitError),
        (431, gh.HeadersTooLargeError),
        (500, gh.InternalServerError),
        (502, gh.BadGatewayError),
        (503, gh.ServiceUnavailableError),
        (504, gh.GatewayTimeoutError),
        (507, gh.InternalServerError),
    ],
)
def test_each_status_has_its_error(connect: Connect, status: int, error: type[gh.APIStatusError]):
    items = [{"pointer": "/optimizer/lr", "detail": "must be finite", "code": "nan"}]
    script = Scripted(*[problem(status, "code_x", errors=items, hint="Do this.") for _ in range(3)])
    client = connect(script.route("/api/v1/jobs/job_1"))
    with pytest.raises(error) as caught:
        client.jobs.get("job_1")
    assert type(caught.value) is error
    assert caught.value.status_code == status
    assert caught.value.code == "code_x"
    assert caught.value.request_id == "req-1"
    assert "/optimizer/lr: must be finite" in str(caught.value)
    assert "Do this." in str(caught.value)


def test_what_is_wrong_is_reported_once(connect: Connect):
    items = [{"pointer": "/stop/epochs", "detail": "must be positive", "code": "range"}]
    detail = "/stop/epochs: must be positive"
    script = Scripted(*[problem(422, errors=items, detail=detail)])
    with pytest.raises(gh.UnprocessableEntityError) as caught:
        connect(script.route("/api/v1/jobs/job_1")).jobs.get("job_1")
    assert str(caught.value) == detail


def test_every_status_error_is_exported_and_every_status_of_the_service_has_one():
    left = list(errors.APIStatusError.__subclasses__())
    found = {cls.status: cls for cls in left}
    while left:
        cls = left.pop()
        assert getattr(gh, cls.__name__) is cls
        left += cls.__subclasses__()
        found[cls.status] = cls
    raised = list(errors.ServiceError.__subclasses__())
    assert {cls.status for cls in raised} <= found.keys()


@pytest.mark.parametrize(
    ("status", "retryable", "tries"),
    [
        (400, True, 1),
        (404, False, 1),
        (408, False, 3),
        (409, False, 1),
        (409, True, 3),
        (422, True, 1),
        (429, False, 3),
        (500, True, 1),
        (502, False, 3),
        (503, False, 1),
        (503, True, 3),
        (504, False, 3),
    ],
)
def test_only_what_may_help_is_retried(connect: Connect, status: int, retryable: bool, tries: int):
    script = Scripted(*[problem(status, retryable=retryable) for _ in range(3)])
    client = connect(script.route("/api/v1/jobs/job_1"))
    with pytest.raises(gh.APIStatusError):
        client.jobs.get("job_1")
    assert len(script.requests) == tries


def test_a_second_try_may_succeed(connect: Connect):
    script = Scripted(problem(502), problem(429), answer(job()))
    assert connect(script.route("/api/v1/jobs/job_1")).jobs.get("job_1").state == "running"


def waits(client: gh.Client) -> list[float]:
    """What the client would have slept."""
    slept: list[float] = []
    client._transport._sleep = slept.append
    return slept


def test_the_pauses_double_and_vary(connect: Connect):
    script = Scripted(problem(502), problem(502), answer(job()))
    client = connect(script.route("/api/v1/jobs/job_1"))
    slept = waits(client)
    client.jobs.get("job_1")
    assert 0.375 <= slept[0] <= 0.5
    assert 0.75 <= slept[1] <= 1.0


def test_retry_after_is_obeyed(connect: Connect):
    soon = problem(429, headers={"Retry-After": "7"})
    past = problem(429, headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"})
    client = connect(Scripted(soon, past, answer(job())).route("/api/v1/jobs/job_1"))
    slept = waits(client)
    client.jobs.get("job_1")
    assert slept == [7.0, 0.0]


def test_a_service_that_asks_for_two_hours_is_not_waited_for(connect: Connect):
    script = Scripted(problem(429, headers={"Retry-After": "7200"}))
    with pytest.raises(gh.RateLimitError) as caught:
        connect(script.route("/api/v1/jobs/job_1")).jobs.get("job_1")
    assert caught.value.retry_after_s == 7200


def test_a_creating_post_has_one_idempotency_key_for_all_tries(connect: Connect):
    script = Scripted(problem(502), answer(job(), 201), answer(job(), 201))
    client = connect(script.route("/api/v1/jobs", "POST"))
    client.jobs.create({"kind": "train"})
    client.jobs.create({"kind": "train"})
    keys = [request.headers["idempotency-key"] for request in script.requests]
    assert keys[0] == keys[1] != keys[2]
    assert script.bodies[0] == script.bodies[1] == b'{"kind":"train"}'


def test_an_upload_is_sent_again_whole(connect: Connect, tmp_path: Any):
    file = tmp_path / "rows.csv"
    file.write_bytes(b"a,b\n" * 200_000)
    dataset = {"id": "ds_1", "state": "ready", "columns": [], "splits": {"all": 1}}
    script = Scripted(problem(502), answer(dataset, 201), answer(dataset))
    client = connect(
        script.route("/api/v1/datasets", "POST"), script.route("/api/v1/datasets/ds_1")
    )
    assert client.datasets.upload(file).splits == {"all": 1}
    assert script.bodies[:2] == [file.read_bytes()] * 2
    assert dict(script.requests[0].query_params) == {"name": "rows.csv", "format": "csv"}
    keys = {request.headers.get("idempotency-key") for request in script.requests[:2]}
    assert len(keys) == 1


def test_the_key_goes_into_the_header_and_nowhere_else(connect: Connect):
    script = Scripted(answer(job()))
    client = connect(script.route("/api/v1/jobs/job_1"))
    client.jobs.get("job_1")
    assert script.requests[0].headers["authorization"] == "Bearer gh_test"
    assert "gh_test" not in repr(client) + repr(client._transport.address)


def test_a_number_that_is_nan_or_inf_is_sent_by_name(connect: Connect):
    script = Scripted(answer(job(), 201))
    client = connect(script.route("/api/v1/jobs", "POST"))
    client.jobs.create({"kind": "infer", "inputs": {"x": [[float("nan"), float("-inf")]]}})
    assert b'[["NaN","-Infinity"]]' in script.bodies[0]


def test_a_list_is_walked_to_its_last_page(connect: Connect):
    pages = Scripted(listing(job(id="job_3"), job(id="job_2"), next="c1"), listing(job(id="job_1")))
    client = connect(pages.route("/api/v1/jobs"))
    found = list(client.jobs.list(state="running", label={"team": "vision"}, limit=2))
    assert [one.id for one in found] == ["job_3", "job_2", "job_1"]
    assert dict(pages.requests[0].query_params) == {
        "state": "running",
        "label": "team:vision",
        "limit": "2",
    }
    assert pages.requests[1].query_params["after"] == "c1"


@pytest.mark.parametrize(
    ("path", "params", "wanted"),
    [
        ("/api/v1/jobs/job_1/cancel?force=true", None, [("force", "true")]),
        ("/api/v1/jobs/job_1/cancel?force=true", {}, [("force", "true")]),
        (
            "/api/v1/jobs/job_1/cancel?a=1&a=2&b=&c=x%20y",
            {"d": [3, 4], "e": None},
            [("a", "1"), ("a", "2"), ("b", ""), ("c", "x y"), ("d", "3"), ("d", "4")],
        ),
    ],
)
def test_a_query_in_the_path_is_sent_beside_the_parameters(
    connect: Connect, path: str, params: dict[str, Any] | None, wanted: list[tuple[str, str]]
):
    script = Scripted(answer(job(), 202))
    connect(script.route("/api/v1/jobs/job_1/cancel", "POST")).request("POST", path, params=params)
    assert script.requests[0].query_params.multi_items() == wanted


def test_an_unused_address_says_what_to_do():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        client = gh.Client(f"http://127.0.0.1:{unused.getsockname()[1]}", "k", max_retries=0)
        with client, pytest.raises(gh.APIConnectionError, match="glasshouse up"):
            client.info()


def test_a_silent_service_is_a_timeout():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        client = gh.Client(url, "k", timeout=0.05, max_retries=0)
        with client, pytest.raises(gh.APITimeoutError):
            client.info()


def test_something_that_is_not_the_service_is_reported_as_such(connect: Connect):
    script = Scripted(PlainTextResponse("<html>hello"))
    with pytest.raises(gh.APIError, match="instead of JSON"):
        connect(script.route("/api/v1/")).info()
