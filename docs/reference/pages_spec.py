"""The page of all fields of a job spec, from the models of ``glasshouse/spec``."""

import json
from typing import Any

from cells import cell
from pages_http import Types
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from glasshouse.spec.network import INPUT_PATTERN
from glasshouse.spec.strict import NAME_PATTERN

Json = dict[str, Any]

PATTERNS = {NAME_PATTERN: "name", INPUT_PATTERN: "input"}
"""Words for patterns, explained in the introduction."""

INTRODUCTION = """# Fields of a job

Every field of a job spec, with its type, its constraints and its default. Unknown fields are
rejected. Numbers must be finite. Times are in seconds (`_s`) and sizes in bytes (`_bytes`), unless
the description gives another unit. If the default is `null`, the description says what happens when
the field is unset. An example is the field's value in JSON.

- **name**: letters, digits and underscores, at most 64 characters, not starting with a digit.
- **input**: the name of a layer or of a data field. `lstm.1.0` is a leaf of a layer that returns
  a tuple. `text.lengths` are the lengths of the rows of a sequence field, and `words.values` the
  values of a sparse field.

Arguments (`args`) of layers, losses, optimizers and schedulers are those of PyTorch;
`GET /api/v1/catalog/{section}` lists them. Generated from `glasshouse/spec/`.
"""


def page(models: tuple[type[BaseModel], ...]) -> str:
    """The page of these models, in this order."""
    types = SpecTypes({}, {model.__name__ for model in models})
    return "\n".join([INTRODUCTION, *(_section(model, types) for model in models)])


class SpecTypes(Types):
    """Describes schemas in words, with links to headings of the same page."""

    def said(self, schema: Json, here: str = "") -> str:
        """A schema as a few words of Markdown."""
        return PATTERNS.get(schema.get("pattern", "")) or super().said(schema, here)

    def link(self, name: str, here: str = "") -> str:
        """A link to a model's fields."""
        return "JSON value" if name == "JsonValue" else f"[{name}](#{name.lower()})"


def _section(model: type[BaseModel], types: SpecTypes) -> str:
    fields = model.model_json_schema()["properties"]
    lines = [f"## {model.__name__}", "", cell(model.__doc__), ""]
    lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
    lines += [_row(name, field, model, types) for name, field in fields.items()]
    return "\n".join(lines) + "\n"


def _row(name: str, schema: Json, model: type[BaseModel], types: SpecTypes) -> str:
    field = model.model_fields[name]
    default = "required" if field.is_required() else f"`{_shown(field.default)}`"
    if field.json_schema_extra is not None:  # set from other fields, as the description says
        default = ""
    said = types.said(schema, "")
    if not field.is_required() and field.default is None:
        said = said.removesuffix(" or null")
    return f"| `{name}` | {cell(said)} | {default} | {cell(field.description)} |"


def _shown(default: object) -> str:
    if isinstance(default, BaseModel):
        return default.model_dump_json(exclude_defaults=True)
    return json.dumps(to_jsonable_python(default), ensure_ascii=False)
