"""Events as the client has them, and as they were sent."""

import pytest

from glasshouse.events import parse_event

HEAD = {"job": "job_x", "seq": 1, "attempt": 1, "at": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    "sent",
    [
        {"type": "state", "from": "queued", "to": "starting", "reason": None},
        {"type": "adjusted", "what": "probe 0.every", "from": 1, "to": 4, "by": "x", "step": 9},
    ],
    ids=["state", "adjusted"],
)
def test_an_event_is_dumped_as_it_was_sent(sent: dict[str, object]):
    event = parse_event(HEAD | sent)
    assert event.from_ == sent["from"]
    assert event.model_dump(mode="json", exclude_unset=True) == HEAD | sent
