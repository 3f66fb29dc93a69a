"""Promises about the documentation: what exists has a page, and pages name what exists."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, create_model

from api.http.problems import problem_of
from glasshouse import errors
from glasshouse.spec import KINDS, Data, Spec
from models.settings import Settings
from tests.security.figures import sizes
from tests.soak.__main__ import page as page_of_soak

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def every(cls: type[errors.GlasshouseError]) -> list[type[errors.GlasshouseError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in every(child))]


def codes() -> dict[str, type[errors.GlasshouseError]]:
    return {
        cls().code: cls  # type: ignore[attr-defined]
        for family in (errors.ServiceError, errors.RunFailure)
        for cls in every(family)
    }


def test_what_the_page_of_datasets_shows_of_a_job_is_of_a_job():
    page = (DOCS / "concepts" / "datasets.md").read_text()
    blocks = [
        json.loads(text)
        for text in re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    ]
    shown = [block["data"] for block in blocks if "data" in block]
    assert len(shown) == 7
    for data in shown:
        Data.model_validate_json(json.dumps(data))


def test_every_view_has_its_pictures_and_every_picture_is_shown():
    """``make pictures`` takes them."""
    there = {path.name for path in (DOCS / "images").iterdir()}
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    shown = {
        name
        for page in pages
        for name in re.findall(r"!\[[^\]]*\]\([^)]*images/([^)]+)\)", page.read_text())
    }
    assert there == shown


def test_every_error_has_a_page_and_every_page_an_error():
    pages = {path.stem for path in (DOCS / "errors").glob("*.md")} - {"index"}
    assert pages == set(codes())


@pytest.mark.parametrize("code", sorted(codes()))
def test_the_page_of_an_error_says_where_why_and_what_to_do(code: str):
    text = (DOCS / "errors" / f"{code}.md").read_text()
    cls = codes()[code]
    assert text.startswith(f"# {code}\n")
    assert "## Why" in text
    assert "## What to do" in text
    if issubclass(cls, errors.ServiceError):
        assert f"HTTP status {cls.status}" in text
    assert ("| yes |" in text) == cls.retryable  # type: ignore[attr-defined]
    assert f"({code}.md)" in (DOCS / "errors" / "index.md").read_text()


@pytest.mark.parametrize("code", sorted(codes()))
def test_a_page_and_the_index_have_the_title_that_the_api_returns(code: str):
    error = codes()[code]()
    if isinstance(error, errors.ServiceError):
        title = problem_of(error, "req_1")["title"]
    else:
        title = error.as_dict()["message"]  # type: ignore[attr-defined]
    page = (DOCS / "errors" / f"{code}.md").read_text()
    index = (DOCS / "errors" / "index.md").read_text()
    on_page = re.match(r"# \w+\n\n(.+?)\n\n", page, re.DOTALL)
    in_index = re.search(rf"^\| \[{code}\]\({code}\.md\) \| (.+) \|$", index, re.MULTILINE)
    for found in (on_page, in_index):
        assert found is not None
        assert found[1].replace("`", "").replace("\n", " ") == title


def test_every_setting_is_documented():
    text = (DOCS / "reference" / "settings.md").read_text()
    for name in Settings.model_fields:
        assert f"`GLASSHOUSE_{name.upper()}`" in text, name


def generated() -> Any:
    """The module ``docs/reference/generate.py``."""
    path = DOCS / "reference" / "generate.py"
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_file_location("generate", path)  # type: ignore[arg-type]
    )
    module.__spec__.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def test_the_generated_pages_are_up_to_date():
    pages = generated().pages()
    there = {f"http/{path.name}" for path in (DOCS / "reference" / "http").glob("*.md")}
    assert there == {name for name in pages if name.startswith("http/")}
    for name, page in pages.items():
        written = (DOCS / "reference" / name).read_text()
        assert written == page, f"{name}: run python docs/reference/generate.py"


def test_every_operation_has_an_example_on_one_page():
    document = json.loads((DOCS / "reference" / "openapi.json").read_text())
    pages = "".join(path.read_text() for path in (DOCS / "reference" / "http").glob("*.md"))
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            place = f"## {operation['summary']}\n\n`{method.upper()} {path}`\n"
            assert pages.count(place) == 1, f"{method} {path}"


def test_everything_that_a_spec_is_made_of_is_on_its_page():
    shown, seen = set(generated().SPEC_MODELS), set[type[BaseModel]]()
    pending: list[Any] = [*KINDS]
    while pending:
        kind = pending.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if kind not in seen:
                seen.add(kind)
                pending += [field.annotation for field in kind.model_fields.values()]
        elif kind is not None:
            pending += [getattr(kind, "__value__", None), *get_args(kind)]
    assert seen == shown


def test_every_field_of_a_spec_has_a_description():
    for model in generated().SPEC_MODELS:
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name} has no description"


@pytest.mark.long
def test_every_example_of_a_field_is_a_value_that_the_field_takes():
    for model in generated().SPEC_MODELS:
        for name, field in model.model_fields.items():
            for example in re.findall(r"Example: ``(.+?)``", field.description or "", re.DOTALL):
                alone = create_model("Alone", __base__=Spec, **{name: (field.annotation, field)})
                alone.model_validate_json(f'{{"{name}": {example}}}')


def test_the_security_page_says_how_much_the_suites_try():
    text = (DOCS / "concepts" / "security.md").read_text()
    for name, count in sizes().items():
        assert f"| {name} | {count} |" in text, f"there are {count} {name} now"


def test_the_figures_of_the_soak_are_those_that_were_kept():
    kept = (ROOT / "bench" / "results" / "soak.jsonl").read_text().splitlines()
    table = page_of_soak([json.loads(line) for line in kept])
    assert table in (DOCS / "concepts" / "restarts.md").read_text(), f"paste this:\n{table}"


def test_the_document_describes_what_a_spec_is_made_of_and_not_its_namesakes():
    """Answers have a Layer, too: it must not stand where a request's is meant."""
    schemas = json.loads((ROOT / "docs/reference/openapi.json").read_text())["components"][
        "schemas"
    ]
    for model in KINDS:
        pending, seen = [schemas[model.__name__]], set[str]()
        described = model.model_json_schema()
        while pending:
            for name in re.findall(_REF + r"(\w+)", json.dumps(pending.pop())):
                if name not in seen:
                    seen.add(name)
                    pending.append(schemas[name])
                    wanted = described["$defs"][name.removesuffix("Spec")]
                    assert schemas[name].get("properties") == _renamed(wanted, schemas), name


def _renamed(schema: dict[str, Any], schemas: dict[str, Any]) -> Any:
    text = json.dumps(schema.get("properties"))

    def name(found: re.Match[str]) -> str:
        own = found[1]
        return f"{_REF}{own}Spec" if f"{own}Spec" in schemas else _REF + own

    return json.loads(re.sub(r"#/\$defs/(\w+)", name, text))


_REF = "#/components/schemas/"
