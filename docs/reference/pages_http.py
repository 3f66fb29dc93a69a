"""The pages of the HTTP API, from its OpenAPI document: one a tag, and one of all objects."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cells import cell

Json = dict[str, Any]

DOCUMENT = Path(__file__).parent / "openapi.json"
BASE = "/api/v1"
METHODS = ("get", "post", "put", "patch", "delete")
ORDER = ("jobs", "inside", "events", "datasets", "checkpoints", "models", "machines", "service")
"""Of the pages; tags that are not here follow."""
VARIABLES = {"jobs": "JOB", "datasets": "DATASET", "checkpoints": "CHECKPOINT", "keys": "KEY_ID"}
VARIABLES |= {"workers": "WORKER", "webhooks": "WEBHOOK", "models": "MODEL"}
PLACES = {"section": "layers", "layer": "conv1", "kind": "output", "plot": "loss"}
PLACES |= {"name": "$NAME", "prb": "$PROBE", "cmd": "$COMMAND", "version": "$VERSION"}
QUERIES = {"/stream": "job=$JOB&job=$OTHER", "/jobs/{id}/metrics/query": "name=loss"}
QUERIES |= {"/jobs/{id}/tensors": "name=conv1/output&name=fc/output&step=50"}
PATCHES = {"/jobs/{id}": '{"name": "better"}', "/jobs/{id}/probes/{prb}": '{"every": 100}'}
PATCHES |= {"/models/{name}": '{"aliases": {"production": 3}}'}
BYTES = "application/octet-stream"
FILES = {"/datasets": ("rows.csv", "name=rows&format=csv")}
FILES |= {"/checkpoints": ("weights.safetensors", "name=mine")}
FILES |= {"/v2/models/{name}/infer": ("request.bin", "")}
FILES |= {"/v2/models/{name}/versions/{version}/infer": ("request.bin", "")}
ARRAYS = {"application/x-npy": "x.npy", "application/vnd.safetensors": "x.safetensors"}
"""Files of media types that hold arrays."""
LONGEST_BODY = 90
NOT_MODIFIED = "304"
ENDS = {"exclusiveMinimum": "greater than", "minimum": "at least"}
ENDS |= {"exclusiveMaximum": "less than", "maximum": "at most"}
COUNTED = {
    ("minLength", "maxLength"): "characters",
    ("minItems", "maxItems"): "items",
    ("minProperties", "maxProperties"): "entries",
}
INDEX = """# HTTP

You can do everything over HTTP that the service does; the client and the command line use only this
API. These pages are generated from the [OpenAPI document](../openapi.json). The service returns it
at `/openapi.json`; at `/docs` you can try every request.

| | |
|---|---|
{tags}
| [Objects](objects.md) | The fields of requests and responses. |

## Conventions

**Paths** begin with `/api/v1`. The lists at the beginning of the pages omit this prefix.

**Keys.** Send `Authorization: Bearer gh_…`. A key has scopes: `read`, `submit`, `admin`. The
examples use these variables, with the values that `glasshouse up` wrote into
`~/.glasshouse/runtime.json`:

```
API=http://127.0.0.1:8420/api/v1; KEY="Authorization: Bearer gh_…"
```

**Numbers.** NaN and Inf are the strings `NaN`, `Infinity` and `-Infinity`. Times are in UTC.

**Lists** are paginated. `limit` sets the length of a page. If `has_more` is true, pass `next` as
`after` to get the next page.

**Idempotency.** Requests that create something accept an `Idempotency-Key`. If you repeat a request
with the same key, you get the first response again.

**Conditional requests.** Many responses have an `ETag`. If you send it as `If-None-Match`, the
response is 304 as long as nothing has changed; with `Prefer: wait=30` the service waits up to 30
seconds for a change. With `If-Match`, a change is rejected if somebody else has changed the
resource in the meantime.

**Waiting.** `POST /jobs` with `Prefer: wait=30` waits up to 30 seconds for the end of the job, so a
short inference is one request: its `state` is `succeeded`, and `result` has the outputs.

```sh
curl -s "$API/jobs" -H "$KEY" -H "Content-Type: application/json" -H "Prefer: wait=30" \
  -d '{{"kind": "infer", "job": "job_…", "inputs": {{"x": [[0.1, 0.2]]}}}}'
```

## Responses

An error is a problem document (RFC 9457) of the type `application/problem+json`: `type`, `title`,
`status`, `detail`, and a stable `code` that has [a page](../../errors/index.md). `errors` lists the
invalid fields of a body, each with a JSON pointer.

| status | meaning |
|---|---|
{meanings}
"""


def pages(spec_models: set[str]) -> dict[str, str]:
    """Every page by its path below ``docs/reference``; ``spec.md`` has the ``spec_models``."""
    document = json.loads(DOCUMENT.read_text())
    types = Types(document["components"]["schemas"], spec_models)
    found = {"http/index.md": _index(document), "http/objects.md": _objects(types)}
    for tag in _tags(document):
        found[f"http/{tag['name']}.md"] = _tag_page(document, tag, types)
    return found


class Types:
    """Describes schemas in words, with links to where their objects are described."""

    def __init__(self, schemas: dict[str, Json], spec_models: set[str]) -> None:
        self.schemas = schemas
        self._spec_models = spec_models

    def of_spec(self, name: str) -> str | None:
        """The heading in ``spec.md`` of what a spec is made of; None: an object of answers."""
        plain = name.removesuffix("Spec")
        if plain != name:
            return plain if plain in self._spec_models else None
        return name if name in self._spec_models and f"{name}Spec" not in self.schemas else None

    def link(self, name: str, here: str = "objects.md") -> str:
        """A link to an object's fields, from a page below ``http``."""
        heading = self.of_spec(name)
        return f"[{name}]({'../spec.md' if heading else here}#{(heading or name).lower()})"

    def said(self, schema: Json, here: str = "objects.md") -> str:
        """A schema as a few words of Markdown."""
        if "$ref" in schema:
            return self.link(schema["$ref"].rpartition("/")[2], here)
        if choices := schema.get("anyOf") or schema.get("oneOf"):
            return _either(self.said(choice, here) for choice in choices)
        if "const" in schema or "enum" in schema:
            return ", ".join(_code(each) for each in schema.get("enum", [schema.get("const")]))
        return self._of_type(schema, here)

    def _items(self, schema: Json, here: str) -> str:
        """What a list contains; a tuple has a schema for each item."""
        items = schema.get("prefixItems") or [schema.get("items", {})]
        said = _either(self.said(item, here) for item in items)
        return f"({said})" if " or " in said or ", " in said else said

    def _of_type(self, schema: Json, here: str) -> str:
        kind, values = schema.get("type", "anything"), schema.get("additionalProperties")
        for of_matching_keys in schema.get("patternProperties", {}).values():
            values = of_matching_keys
        if kind == "array":
            return f"list of {self._items(schema, here)}{_bounds(schema)}"
        if kind == "object" and isinstance(values, dict):
            return f"object of {self._items({'items': values}, here)}{_bounds(schema)}"
        return f"{kind}{_bounds(schema)}"


def _either(choices: Iterable[str]) -> str:
    """Alternatives, null last; semicolons separate those that contain commas."""
    found = dict.fromkeys(choices)
    values = [choice for choice in found if choice != "null"]
    separator = "; or " if any(", " in choice for choice in values) else " or "
    return separator.join(values) + (" or null" if "null" in found else "")


def _bounds(schema: Json) -> str:
    """The constraints of a schema, after a comma: ``, greater than 0 and at most 1``."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f", {_number(low)} to {_number(high)}"
    for words, unit in COUNTED.items():
        if (counted := _counted(schema, *words)) is not None:
            what = "entries" if schema.get("type") == "object" else unit
            return f", {counted} {what.removesuffix('s') if counted == 'exactly 1' else what}"
    if schema.get("type") == "integer" and low is None and "exclusiveMinimum" in schema:
        schema = schema | {"minimum": schema["exclusiveMinimum"] + 1}
        del schema["exclusiveMinimum"]
    ends = [f"{said} {_number(schema[word])}" for word, said in ENDS.items() if word in schema]
    return f", {' and '.join(ends)}" if ends else ""


def _counted(schema: Json, least: str, most: str) -> str | None:
    low, high = schema.get(least, 0), schema.get(most)
    if high is None:
        return f"at least {_number(low)}" if low else None
    if low == high:
        return f"exactly {_number(low)}"
    return f"{_number(low)} to {_number(high)}" if low else f"at most {_number(high)}"


def _number(value: float) -> str:
    """A bound as people write it: 0.5, 1,000,000, 2^53."""
    if value != int(value):
        return f"{value:g}"
    whole = abs(int(value))
    if whole >= 2**31 and whole.bit_count() == 1:
        return f"{'-' if value < 0 else ''}2^{whole.bit_length() - 1}"
    return f"{int(value):,}" if whole < 2**63 else f"{value:.7g}"


def _code(value: object) -> str:
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _tags(document: Json) -> list[Json]:
    place = {name: number for number, name in enumerate(ORDER)}
    return sorted(document["tags"], key=lambda tag: (place.get(tag["name"], 99), tag["name"]))


def _operations(document: Json, tag: str) -> Iterator[tuple[str, str, Json]]:
    for path, methods in document["paths"].items():
        for method in METHODS:
            if tag in methods.get(method, {}).get("tags", []):
                yield method, path, methods[method]


def _index(document: Json) -> str:
    tags = (
        f"| [{tag['name'].capitalize()}]({tag['name']}.md) | {tag['description']} |"
        for tag in _tags(document)
    )
    meanings = (f"| {code} | {said} |" for code, said in sorted(_meanings(document).items()))
    return INDEX.format(tags="\n".join(tags), meanings="\n".join(meanings))


def _meanings(document: Json) -> dict[str, str]:
    return {
        status: answer["description"]
        for methods in document["paths"].values()
        for operation in methods.values()
        for status, answer in operation["responses"].items()
        if status >= NOT_MODIFIED
    }


def _tag_page(document: Json, tag: Json, types: Types) -> str:
    operations = list(_operations(document, tag["name"]))
    lines = [
        f"# {tag['name'].capitalize()}",
        "",
        f"{tag['description']} The [conventions](index.md#conventions) apply to every request.",
        "",
    ]
    are_all_below = all(path.startswith(BASE) for _, path, _ in operations)
    lines += ["| | |", "|---|---|"]
    for method, path, operation in operations:
        said, shown = operation["summary"], path.removeprefix(BASE) if are_all_below else path
        lines.append(f"| [{said}](#{_anchor(said)}) | `{method.upper()} {shown}` |")
    for method, path, operation in operations:
        lines += ["", *_operation(method, path, operation, types)]
    return "\n".join(lines) + "\n"


def _operation(method: str, path: str, operation: Json, types: Types) -> Iterator[str]:
    yield from (f"## {operation['summary']}", "", f"`{method.upper()} {path}`", "")
    yield from (operation.get("description", "").replace("``", "`"), "")
    if parameters := operation.get("parameters"):
        yield from ("| parameter | in | type | meaning |", "|---|---|---|---|")
        yield from (_parameter(parameter, types) for parameter in parameters)
        yield ""
    if body := operation.get("requestBody"):
        for media, content in body["content"].items():
            yield f"Request body, `{media}`: {_content(content, types)}."
        yield ""
    yield from (_answers(operation["responses"], types), "", "```")
    yield from (*_curls(method, path, operation), "```")


def _parameter(parameter: Json, types: Types) -> str:
    schema = parameter["schema"]
    said = types.said(schema).removesuffix(" or null")
    if parameter.get("required") and parameter["in"] != "path":
        said += ", required"
    if "default" in schema:
        said += f"; default {_code(schema['default'])}"
    meaning = parameter.get("description", "")
    name = schema["title"] if parameter["in"] == "header" else parameter["name"]
    return f"| `{name}` | {parameter['in']} | {cell(said)} | {cell(meaning)} |"


def _content(content: Json, types: Types) -> str:
    schema = content.get("schema", {})
    is_bytes = schema.get("contentMediaType") or schema.get("format") == "binary"
    return "the bytes" if is_bytes else types.said(schema)


def _answers(responses: Json, types: Types) -> str:
    good = {status: answer for status, answer in responses.items() if status < NOT_MODIFIED}
    successes = [
        f"**{status}** " + (_media(answer.get("content", {}), types) or answer["description"])
        for status, answer in good.items()
    ]
    others = sorted(status for status in responses if status not in good)
    rest = f" Other responses: [{', '.join(others)}](index.md#responses)." if others else ""
    return f"Responses: {'; '.join(successes)}.{rest}"


def _media(content: Json, types: Types) -> str:
    return ", ".join(
        _content(shown, types) if media == "application/json" else f"`{media}`"
        for media, shown in content.items()
        if shown.get("schema") or len(content) == 1
    )


def _curls(method: str, path: str, operation: Json) -> Iterator[str]:
    """One command for each type that the body may have; patches have two names for one."""
    content = operation.get("requestBody", {}).get("content", {"": {}})
    for media, sent in content.items():
        if media != "application/json" or "application/merge-patch+json" not in content:
            words = ["curl", "-sSN" if _is_stream(operation) else "-sS"]
            words += [] if method == "get" else ["-X", method.upper()]
            words += [] if operation.get("security") == [] else ["-H", '"$KEY"']
            words += _sent(path.removeprefix(BASE), media, sent)
            yield " ".join([*words, f'"{_address(path, media)}"'])


def _is_stream(operation: Json) -> bool:
    return "text/event-stream" in operation["responses"].get("200", {}).get("content", {})


def _address(path: str, media: str) -> str:
    below = path.removeprefix(BASE)
    places = {"id": f"${VARIABLES.get(below.split('/')[1], 'ID')}"} | PLACES
    filled = re.sub(r"\{(\w+)\}", lambda found: places[found[1]], below)
    query = QUERIES.get(below, "") or (FILES[below][1] if media == BYTES else "")
    host = "$API" if path.startswith(BASE) else "http://127.0.0.1:8420"
    return host + filled + (f"?{query}" if query else "")


def _sent(below: str, media: str, sent: Json) -> list[str]:
    if not media:
        return []
    if media == BYTES:
        return ["--data-binary", f"@{FILES[below][0]}"]
    if media in ARRAYS and "example" not in sent:
        return ["-H", f"'Content-Type: {media}'", "--data-binary", f"@{ARRAYS[media]}"]
    body = json.dumps(sent["example"], ensure_ascii=False) if "example" in sent else PATCHES[below]
    shown = f"'{body}'" if len(body) <= LONGEST_BODY else "@job.json"
    return ["-H", f"'Content-Type: {media}'", "-d", shown]


def _objects(types: Types) -> str:
    lines = [
        "# Objects",
        "",
        "The fields of requests and responses. The fields of a job's spec are on",
        "[another page](../spec.md).",
    ]
    for name, schema in sorted(types.schemas.items()):
        if types.of_spec(name) is None:
            lines += ["", f"## {name}", "", *_object(schema, types)]
    return "\n".join(lines) + "\n"


def _object(schema: Json, types: Types) -> Iterator[str]:
    if described := schema.get("description"):
        yield from (" ".join(described.replace("``", "`").split()), "")
    fields = schema.get("properties")
    if fields is None:
        yield f"{types.said(schema, '').capitalize()}."
        return
    yield from ("| field | type | meaning |", "|---|---|---|")
    for name, field in fields.items():
        said, meaning = types.said(field, ""), field.get("description", "")
        yield f"| `{name}` | {cell(said)} | {cell(meaning)} |"
