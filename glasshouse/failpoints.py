"""Failpoints: places at which a test makes a process die, fail or hang. Disabled by default.

``FAILPOINTS`` has one rule or several, separated by ``;``: ``NAME=ACTION`` or ``NAME=ACTION@N``,
the N-th time that this process passes it (default: the first). Actions: ``kill`` (SIGKILL of this
process), ``raise`` (``OSError``), ``pause`` and ``pause:SECONDS`` (60). ``FAILPOINTS_ONCE`` names a
directory: a rule that was followed leaves a file there, and is not followed again by any process.
The names are in CONTRIBUTING.md. Only for tests.
"""

import errno
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLES = ("FAILPOINTS", "FAILPOINTS_ONCE")
PAUSE_S = 60.0
_ACTIONS = ("kill", "raise", "pause")


@dataclass(frozen=True, slots=True)
class Rule:
    """The action at a failpoint."""

    point: str
    action: str
    pause_s: float
    hit: int

    @staticmethod
    def read(text: str) -> "Rule":
        """Read ``NAME=ACTION@N``.

        Raises:
            ValueError: it has another form.
        """
        point, _, rest = text.strip().partition("=")
        action, _, hit = rest.partition("@")
        action, _, seconds = action.partition(":")
        if not point or action not in _ACTIONS:
            raise ValueError(f"{text!r} is not of the form NAME=kill|raise|pause[:SECONDS][@N]")
        return Rule(point, action, float(seconds or PAUSE_S), int(hit or 1))


class Failpoints:
    """The rules of one process, and how often it reached each failpoint."""

    def __init__(self, rules: str, once: Path | None = None) -> None:
        self._rules = [Rule.read(text) for text in rules.split(";") if text.strip()]
        self._once = once
        self._hits: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, name: str) -> None:
        """Reach a failpoint."""
        with self._lock:
            self._hits[name] += 1
            hit = self._hits[name]
        for rule in self._rules:
            if rule.point == name and rule.hit == hit and self._is_first(rule):
                self._act(rule)

    def _is_first(self, rule: Rule) -> bool:
        if self._once is None:
            return True
        try:
            (self._once / f"{rule.point}.{rule.action}.{rule.hit}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _act(self, rule: Rule) -> None:
        if rule.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif rule.action == "pause":
            time.sleep(rule.pause_s)
        else:
            raise OSError(errno.EIO, f"the failpoint {rule.point} says so")


def _nothing(name: str) -> None:
    pass


def chosen(environment: Mapping[str, str]) -> Callable[[str], None]:
    """What ``failpoint`` is in a process with this environment."""
    rules, once = (environment.get(name) for name in VARIABLES)
    return Failpoints(rules, Path(once) if once else None) if rules else _nothing


failpoint = chosen(os.environ)
"""Reach the failpoint of this name."""
