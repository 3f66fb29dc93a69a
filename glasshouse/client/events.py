"""Events as a program reads them, those of a later version of the service too."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from glasshouse import jsonio
from glasshouse.events import Event, parse_event


class OtherEvent(BaseModel):
    """An event of a type that this version of the client does not know."""

    model_config = ConfigDict(extra="allow")

    job: str
    seq: int
    type: str


AnyEvent = Event | OtherEvent


def read_event(record: dict[str, Any]) -> AnyEvent:
    """Read an event from the service's JSON; named non-finite numbers become floats."""
    value = dict(record)
    if isinstance(value.get("values"), dict):
        value["values"] = {key: jsonio.number(item) for key, item in value["values"].items()}
    if isinstance(value.get("rows"), list):
        # the first two columns are names: a layer may well be called NaN
        value["rows"] = [[*row[:2], *map(jsonio.number, row[2:])] for row in value["rows"]]
    try:
        return parse_event(value)
    except ValidationError:
        return OtherEvent.model_validate(value)
