"""Webhook signatures, as in the Standard Webhooks specification.

A receiver calls ``verify`` with the raw body, the headers and the secret that it was shown when it
made the webhook; any library for Standard Webhooks does the same.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping

PREFIX = "whsec_"
TOLERANCE_S = 300.0


class SignatureWrong(ValueError):
    """The message was not signed with this secret, or its timestamp is too old."""


def new_secret() -> str:
    """A secret: ``whsec_`` and 32 random bytes in base 64."""
    return PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def sign(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """The value of the header ``webhook-signature``.

    Args:
        secret: as ``new_secret`` made it.
        message_id: the header ``webhook-id``.
        timestamp: the header ``webhook-timestamp``, Unix seconds.
        body: the raw body.
    """
    key = base64.b64decode(secret.removeprefix(PREFIX))
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()


def verify(
    body: bytes, headers: Mapping[str, str], secret: str, *, now: float | None = None
) -> None:
    """Check that a message comes from the service and is fresh.

    Raises:
        SignatureWrong: it does not, or a header is missing, or it is older than five minutes.
    """
    named = {name.lower(): value for name, value in headers.items()}
    try:
        message_id = named["webhook-id"]
        timestamp = int(named["webhook-timestamp"])
        given = named["webhook-signature"].split()
    except (KeyError, ValueError) as error:
        raise SignatureWrong(f"a header is missing or cannot be read: {error}") from None
    if abs((time.time() if now is None else now) - timestamp) > TOLERANCE_S:
        raise SignatureWrong("the message is not fresh")
    try:
        wanted = sign(secret, message_id, timestamp, body).encode()
    except binascii.Error:
        raise SignatureWrong("the secret is none") from None
    if not any(hmac.compare_digest(wanted, one.encode()) for one in given):
        raise SignatureWrong("no signature fits")
