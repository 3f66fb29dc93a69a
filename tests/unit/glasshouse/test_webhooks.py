import base64
import hashlib
import hmac

import pytest

from glasshouse.webhooks import SignatureWrong, new_secret, sign, verify

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105
BODY = b'{"test": 2432232314}'
HEADERS = {
    "Webhook-Id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
    "Webhook-Timestamp": "1614265330",
    "Webhook-Signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
}


def test_the_signature_is_that_of_the_specifications_own_example():
    assert sign(SECRET, HEADERS["Webhook-Id"], 1614265330, BODY) == HEADERS["Webhook-Signature"]
    verify(BODY, HEADERS, SECRET, now=1614265330)


def test_the_signature_is_what_the_words_of_the_specification_say():
    secret = new_secret()
    key = base64.b64decode(secret.removeprefix("whsec_"))
    assert len(key) == 32
    mac = hmac.new(key, b"msg_1.17.body", hashlib.sha256).digest()
    assert sign(secret, "msg_1", 17, b"body") == "v1," + base64.b64encode(mac).decode()


@pytest.mark.parametrize(
    ("change", "body", "now"),
    [
        ({}, b"other", 1614265330),
        ({}, BODY, 1614265330 + 301),
        ({}, BODY, 1614265330 - 301),
        ({"Webhook-Id": "msg_other"}, BODY, 1614265330),
        ({"Webhook-Timestamp": "1614265331"}, BODY, 1614265330),
        ({"Webhook-Timestamp": "soon"}, BODY, 1614265330),
        ({"Webhook-Signature": "v1,AAAA"}, BODY, 1614265330),
        ({"Webhook-Signature": ""}, BODY, 1614265330),
    ],
)
def test_what_was_changed_or_is_old_is_refused(change: dict[str, str], body: bytes, now: float):
    with pytest.raises(SignatureWrong):
        verify(body, HEADERS | change, SECRET, now=now)


def test_one_of_several_signatures_is_enough():
    several = "v1,AAAA " + HEADERS["Webhook-Signature"]
    verify(BODY, HEADERS | {"Webhook-Signature": several}, SECRET, now=1614265330)
    with pytest.raises(SignatureWrong):
        verify(BODY, HEADERS, new_secret(), now=1614265330)
