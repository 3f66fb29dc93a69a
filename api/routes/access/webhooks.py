"""Webhooks: addresses that are notified of state changes and findings of their owner's jobs."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import Field as Constraint
from starlette.responses import Response

from api.app_state import AppStateDep
from api.http.access import Read, Submit
from api.http.answers import Json, Paged, page_of, time_text
from api.http.bodies import Body, Parsed, body_of, described
from api.schemas import documents
from api.schemas.views import BASE
from api.submission import idempotent
from api.submission.idempotent import OnceKey
from glasshouse import jsonio
from glasshouse.errors import FieldProblem, InvalidRequest
from glasshouse.spec.jobs.job import Label, LabelValue
from models.access import webhooks
from models.access.addresses import AddressRefused, Allowed, check, target_of
from models.access.idempotency import Answer
from models.database import Transaction
from models.tables import Delivery, Webhook

router = APIRouter(prefix=BASE, tags=["webhooks"])
_LOCAL = ("localhost", ".localhost")


class WebhookRequest(Body):
    """The webhook to create."""

    url: str = Constraint(min_length=1, max_length=2048)
    """Where messages are posted. Must be https and a public address unless the service allows more.
    """
    events: tuple[str, ...] = Constraint(default=(), max_length=len(webhooks.TYPES))
    """Types of message: `job.<state>`, and `job.finding`. Empty: all. Of a job whose guard lets it
    continue after NaN or Inf, only the first finding of each attempt is sent."""
    labels: dict[Label, LabelValue] = Constraint(default={}, max_length=50)
    """Only jobs that have all of these labels."""


@router.post(
    "/webhooks",
    status_code=201,
    summary="Create a webhook",
    openapi_extra=described(
        WebhookRequest,
        example={"url": "https://example.org/hook", "events": ["job.succeeded", "job.failed"]},
    ),
    responses=documents.answers(201, documents.NewWebhook, 400, 401, 403, 409, 415, 422),
)
def create_webhook(
    app_state: AppStateDep,
    caller: Submit,
    once_key: OnceKey,
    body: Annotated[Parsed[WebhookRequest], Depends(body_of(WebhookRequest))],
) -> Response:
    """The response shows the signing secret once. A replayed response shows null."""
    wanted = body.value
    _check_url(wanted.url, Allowed.of(app_state.settings.outbound_allow))
    _check_events(wanted.events)
    secret = ""

    def make(tx: Transaction) -> Answer:
        nonlocal secret
        row = webhooks.add(
            tx, owner=caller.owner, url=wanted.url, events=wanted.events, labels=wanted.labels
        )
        secret = row.secret
        shown = webhook_json(row) | {"secret": None}
        return Answer(201, {"Location": f"{BASE}/webhooks/{row.id}"}, jsonio.dumps(shown))

    token = idempotent.token_of(caller, "POST /webhooks", once_key, body.raw)
    answer, replayed = idempotent.once(app_state.database, token, make)
    if not replayed:
        shown = jsonio.loads(answer.body) | {"secret": secret}
        answer = Answer(answer.status, answer.headers, jsonio.dumps(shown))
    return idempotent.sent(answer, replayed=replayed)


def _check_url(url: str, allowed: Allowed) -> None:
    """Refuse addresses that are visibly not allowed. The others are checked at each delivery."""
    try:
        target = target_of(url)
        if target.host == _LOCAL[0] or target.host.endswith(_LOCAL[1]):
            check(target, ["127.0.0.1"], allowed)
        elif ":" in target.host or target.host.replace(".", "").isdigit():
            check(target, [target.host], allowed)
    except (AddressRefused, ValueError) as error:
        problem = FieldProblem("/url", str(error), "address_refused")
        raise InvalidRequest(f"/url: {error}", problems=[problem]) from None


def _check_events(events: tuple[str, ...]) -> None:
    for place, name in enumerate(events):
        if name not in webhooks.TYPES:
            detail = f"{name[:50]!r} is none of {', '.join(webhooks.TYPES)}"
            problem = FieldProblem(f"/events/{place}", detail, "invalid_value")
            raise InvalidRequest(f"{problem.pointer}: {detail}", problems=[problem])


@router.get(
    "/webhooks",
    summary="List webhooks",
    responses=documents.answers(200, documents.WebhookList, 400, 401, 422),
)
def list_webhooks(app_state: AppStateDep, caller: Read, page: Paged) -> Response:
    """Newest first, without secrets."""
    after = page.after_id("whk")
    with app_state.database.read() as tx:
        rows = webhooks.find(tx, owner=caller.sees, after=after, limit=page.limit + 1)
    return Json(page_of(rows, page, [webhook_json(row) for row in rows]))


@router.get(
    "/webhooks/{id}",
    summary="Get a webhook",
    responses=documents.answers(200, documents.Webhook, 401, 404),
)
def get_webhook(app_state: AppStateDep, caller: Read, id: str) -> Response:  # noqa: A002
    """One webhook, without its secret."""
    with app_state.database.read() as tx:
        row = webhooks.get(tx, id, caller.sees)
    return Json(webhook_json(row))


@router.delete(
    "/webhooks/{id}",
    status_code=204,
    summary="Delete a webhook",
    responses=documents.answers(204, None, 401, 403, 404),
)
def delete_webhook(app_state: AppStateDep, caller: Submit, id: str) -> Response:  # noqa: A002
    """Delete the webhook and its deliveries. Nothing more is sent to it."""
    with app_state.database.write() as tx:
        webhooks.delete(tx, webhooks.get(tx, id, caller.sees))
    return Response(status_code=204)


@router.get(
    "/webhooks/{id}/deliveries",
    summary="List the deliveries of a webhook",
    responses=documents.answers(200, documents.DeliveryList, 400, 401, 404, 422),
)
def list_deliveries(app_state: AppStateDep, caller: Read, id: str, page: Paged) -> Response:  # noqa: A002
    """Newest first: delivered, pending a retry, or failed, with the last problem."""
    after = page.after_id("msg")
    with app_state.database.read() as tx:
        webhooks.get(tx, id, caller.sees)
        rows = webhooks.deliveries(tx, id, after=after, limit=page.limit + 1)
    return Json(page_of(rows, page, [delivery_json(row) for row in rows]))


def webhook_json(row: Webhook) -> dict[str, Any]:
    """Return a webhook as clients see it."""
    path = f"{BASE}/webhooks/{row.id}"
    return {
        "id": row.id,
        "object": "webhook",
        "owner": row.owner,
        "url": row.url,
        "events": row.events,
        "labels": row.labels,
        "created_at": time_text(row.created_at),
        "failing_since": time_text(row.failing_since),
        "disabled_at": time_text(row.disabled_at),
        "disabled_reason": row.disabled_reason,
        "links": {"self": path, "deliveries": f"{path}/deliveries"},
    }


def delivery_json(row: Delivery) -> dict[str, Any]:
    """Return a delivery as clients see it."""
    return {
        "id": row.id,
        "object": "delivery",
        "webhook": row.webhook,
        "type": row.type,
        "state": row.state,
        "tries": row.tries,
        "status": row.status,
        "problem": row.problem,
        "payload": jsonio.loads(row.body),
        "created_at": time_text(row.created_at),
        "ended_at": time_text(row.ended_at),
    }
