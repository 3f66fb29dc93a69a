"""Delivers webhooks: signed, with retries, to public or explicitly allowed addresses only.

A message is claimed right before it is sent, so a slow receiver gets it once. It may be sent twice
after a crash between sending and commit; its ``webhook-id`` is then the same. Order is not
guaranteed: each message has the time and the number of its event.
"""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from glasshouse.webhooks import sign
from models.access import webhooks
from models.access.addresses import AddressRefused, Allowed
from models.access.webhooks import Sending
from worker.context import WorkerContext
from worker.delivery.outbound import OutboundFailed, RequestLimits, send

_log: Any = structlog.get_logger()

LOOK_EVERY_S = 1.0
MAX_TRIES = 15
"""With pauses of up to six hours, the last try is about two days after the first."""
_LONGEST_PAUSE_S = 6 * 3600.0
_AT_ONCE = 8
_STORING_S = 60.0
"""A claim lasts for the request's timeout plus this: storing the result may have to wait for a
connection to the database."""


class Delivering:
    """Sends what is due, once per call."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._allowed = Allowed.of(context.settings.outbound_allow)
        self._limits = RequestLimits(total_s=context.settings.webhook_timeout_s, max_bytes=4096)

    def __call__(self) -> None:
        """Send what is due now."""
        with self._context.database.read() as tx:
            due = webhooks.due(tx)
        if due:
            with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="webhook") as pool:
                list(pool.map(self._send_in_turn, due))

    def _send_in_turn(self, webhook: str) -> None:
        """Send some messages of one webhook, each claimed right before: a turn may be long."""
        hold_ms = round(1000 * (self._limits.total_s + _STORING_S))
        for _ in range(webhooks.PER_TURN):
            if self._context.stopping.is_set():
                return
            with self._context.database.write() as tx:
                sending = webhooks.take(tx, webhook, hold_ms=hold_ms)
            if sending is None:
                return
            try:
                self._send(sending)
            except Exception:
                _log.exception("delivery_failed", delivery=sending.id)  # it is retried

    def _send(self, sending: Sending) -> None:
        status: int | None = None
        try:
            status = self._post(sending)
            problem = None if 200 <= status < 300 else f"the receiver answered {status}"
        except (AddressRefused, OutboundFailed) as error:
            problem = str(error)
        with self._context.database.write() as tx:
            if problem is None:
                webhooks.delivered(tx, sending, status or 0)
                switched_off = False
            else:
                switched_off = webhooks.missed(
                    tx,
                    sending,
                    status=status,
                    problem=problem,
                    retry_in_s=self._pause_s(sending.tries),
                    disable_after_s=self._context.settings.webhook_disable_after_s,
                )
        fields = {"webhook": sending.webhook, "delivery": sending.id, "tries": sending.tries}
        _log.info("webhook_sent", **fields, status=status, problem=problem)
        if switched_off:
            _log.warning("webhook_switched_off", webhook=sending.webhook)

    def _post(self, sending: Sending) -> int:
        body, timestamp = sending.body.encode(), int(time.time())
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "glasshouse-webhooks",
            "webhook-id": sending.id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": sign(sending.secret, sending.id, timestamp, body),
        }
        reply = send(
            sending.url, body=body, headers=headers, allowed=self._allowed, limits=self._limits
        )
        return reply.status

    def _pause_s(self, tries: int) -> float | None:
        if tries >= MAX_TRIES:
            return None
        longest = min(_LONGEST_PAUSE_S, self._context.settings.webhook_retry_s * 4 ** (tries - 1))
        return longest * random.uniform(0.8, 1.2)  # noqa: S311 (so that not all come back at once)
