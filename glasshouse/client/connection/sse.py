"""A parser for server-sent events, as specified in the HTML standard. Does no I/O."""

import codecs
import re
from dataclasses import dataclass

_LINE_END = re.compile(r"\r\n|\n|\r")


@dataclass(frozen=True, slots=True)
class Message:
    """One dispatched event."""

    event: str
    """The event type; ``message`` by default."""
    data: str
    id: str
    """The last id in the stream, possibly from an earlier message; or empty."""


class Decoder:
    """Decodes the stream of one connection. Chunk boundaries may be anywhere."""

    def __init__(self) -> None:
        self.retry_ms: int | None = None
        """The reconnection time set by the stream, in milliseconds."""
        self._text = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        self._rest = ""
        self._after_cr = False
        self._event = ""
        self._data: list[str] = []
        self._id = ""

    def feed(self, chunk: bytes) -> list[Message]:
        """Add bytes and return the messages that they complete. Incomplete data is buffered."""
        text = self._text.decode(chunk)
        if not text:
            return []
        if self._after_cr and text[0] == "\n":  # the second half of a CRLF that was split
            text = text[1:]
        self._after_cr = text.endswith("\r")
        *lines, self._rest = _LINE_END.split(self._rest + text)
        messages: list[Message] = []
        for line in lines:
            if line:
                self._read(line)
            elif (message := self._dispatch()) is not None:
                messages.append(message)
        return messages

    def _read(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self._id = value
        elif name == "retry" and value.isascii() and value.isdigit():
            self.retry_ms = int(value)

    def _dispatch(self) -> Message | None:
        event, data = self._event or "message", self._data
        self._event, self._data = "", []
        return Message(event, "\n".join(data), self._id) if data else None
