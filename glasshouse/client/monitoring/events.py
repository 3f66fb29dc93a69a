"""Event objects of the client, including events of newer service versions."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from glasshouse import jsonio
from glasshouse.events import Event, parse_event


class OtherEvent(BaseModel):
    """An event whose type is unknown to this version of the client."""

    model_config = ConfigDict(extra="allow")

    job: str
    seq: int
    type: str


AnyEvent = Event | OtherEvent


def read_event(record: dict[str, Any]) -> AnyEvent:
    """Parse an event. The strings "NaN" and "Infinity" become floats."""
    value = dict(record)
    if isinstance(value.get("values"), dict):
        value["values"] = {key: jsonio.number(item) for key, item in value["values"].items()}
    if isinstance(value.get("rows"), list):
        # the first two columns are names: a layer may be named NaN
        value["rows"] = [[*row[:2], *map(jsonio.number, row[2:])] for row in value["rows"]]
    try:
        return parse_event(value)
    except ValidationError:
        return OtherEvent.model_validate(value)
