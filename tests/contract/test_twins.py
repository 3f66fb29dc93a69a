"""The client that blocks and the one that is awaited are one client."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import glasshouse as gh
from glasshouse.client import aio

ROOT = Path(gh.__file__).parents[1]
CLASSES = sorted(name for name in gh.__all__ if name.startswith("Async"))
RESOURCES = ("jobs", "datasets", "checkpoints", "devices", "workers", "keys", "quotas", "webhooks")


def test_the_blocking_client_is_what_the_script_makes_of_the_awaited_one():
    command = [sys.executable, ".ci/twins.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def shown(value: Any) -> str:
    """A signature without what says that it is awaited."""
    text = str(value).replace("glasshouse.client.aio.", "glasshouse.client.blocking.")
    return text.replace("Async", "").replace("async_generator", "generator")


def surface(cls: type) -> dict[str, str]:
    """The public names of a class, and how they are called."""
    found: dict[str, str] = {}
    for name, member in inspect.getmembers(cls):
        plain = name.replace("__a", "__") if name.startswith("__a") else name
        if inspect.isfunction(member) and not (name.startswith("_") and plain == name):
            found[plain] = shown(inspect.signature(member))
        elif isinstance(member, property):
            found[plain] = f"property {shown(inspect.signature(member.fget or repr))}"
    return found


def pairs() -> list[tuple[type, type]]:
    named = [(getattr(gh, name), getattr(gh, name.removeprefix("Async"))) for name in CLASSES]
    with gh.Client("http://127.0.0.1:1", "k") as blocking:
        awaited = gh.AsyncClient("http://127.0.0.1:1", "k")
        named += [
            (type(getattr(awaited, kind)), type(getattr(blocking, kind))) for kind in RESOURCES
        ]
    return named


@pytest.mark.parametrize(("awaited", "blocking"), pairs(), ids=lambda cls: cls.__name__)
def test_both_have_the_same_methods_with_the_same_parameters(awaited: type, blocking: type):
    missing = {"__enter__", "__exit__", "__iter__"}  # dunders, of which one side has other names
    wanted = {name: told for name, told in surface(awaited).items() if name not in missing}
    assert wanted == surface(blocking)
    assert awaited.__name__ == f"Async{blocking.__name__}"


def test_every_class_that_waits_is_exported_for_both():
    assert sorted(aio.__all__) == sorted({*CLASSES, "AsyncRecord"})
    assert {name.removeprefix("Async") for name in CLASSES} <= set(gh.__all__)


def test_what_asks_the_service_is_awaited_and_what_knows_is_not():
    job = gh.AsyncJob
    for name in ("wait", "pause", "metrics", "weights", "probe", "spec", "set"):
        assert inspect.iscoroutinefunction(getattr(job, name)), name
    assert inspect.isasyncgenfunction(job.events)
    assert not inspect.iscoroutinefunction(job.stream)
    assert not inspect.iscoroutinefunction(job.raise_if_unsuccessful)


def test_no_docstring_of_the_blocking_client_speaks_of_awaiting_itself():
    """The script takes ``Async`` out of names, also where they tell the two apart."""
    for name in CLASSES:
        told = inspect.getdoc(getattr(gh, name.removeprefix("Async"))) or ""
        for sentence in told.split(". "):
            assert not re.search(r"`(\w+)`.*`\1`", sentence.replace("\n", " ")), sentence
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    assert "`Client` has the same methods" not in page


def test_the_service_advertises_no_empty_section_of_its_catalog():
    from api.routes.service.catalog import SECTIONS, UNFILLED
    from engine.plan.catalog import section

    assert [name for name in SECTIONS if not section(name)] == list(UNFILLED)
