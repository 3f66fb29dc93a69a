"""Which outputs a request wants, and what of each."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.tensor_names import root
from engine.inference.classes import TOP_K
from engine.serving.asked import Problems, listed, similar, token
from engine.serving.model_inputs import ModelInputs, Wanted
from glasshouse import jsonio

FIELDS = ("value", "id", "prob", "top_k")
"""What a request may want of an output."""
_OPTIONS = frozenset(("outputs", "fields", "top_k"))
MAX_OUTPUTS = 1000
MAX_TOP_K = 10_000


def wanted(
    inputs: ModelInputs, given: Mapping[str, Any], problems: Problems, base: str = ""
) -> Wanted:
    """Read ``outputs``, ``fields`` and ``top_k`` of a request; add what is wrong to ``problems``.

    ``base``: the pointer to the object that has them.
    """
    if _OPTIONS.isdisjoint(given) and inputs.default_wanted is not None:
        return inputs.default_wanted
    outputs = _names(given, "outputs", problems, base, MAX_OUTPUTS)
    fields = _names(given, "fields", problems, base, len(FIELDS))
    top_k = given.get("top_k")
    if top_k is not None and not (type(top_k) is int and 1 <= top_k <= MAX_TOP_K):
        shown = jsonio.dumps(top_k)[:100] if not isinstance(top_k, list | dict) else "a list"
        detail = f"top_k is {shown}: give an integer from 1 to {MAX_TOP_K:,}"
        problems.problem(f"{base}/top_k", detail, "type")
        top_k = None
    for number, name in enumerate(fields or ()):
        if name not in FIELDS:
            detail = f"there is no field {name[:100]!r}; there are: {', '.join(FIELDS)}"
            detail += similar(name, FIELDS)
            problems.problem(f"{base}/fields/{number}", detail, "unknown_field")
    if top_k is not None and fields is not None and "top_k" not in fields:
        detail = f"top_k ({top_k}) is the size of a field that fields does not name: add"
        problems.problem(f"{base}/top_k", f'{detail} "top_k" to fields, or remove top_k', "unused")
    names = inputs.default_outputs if outputs is None else outputs
    each = tuple(fields or inputs.default_fields(name, top_k) for name in names)
    for number, (name, own) in enumerate(zip(names, each, strict=True)):
        pointer = f"{base}/outputs" if outputs is None else f"{base}/outputs/{number}"
        about = "top_k" if fields is None else "fields"
        check_output(inputs, name, own, top_k, problems, (pointer, f"{base}/{about}", base))
    return Wanted(tuple(names), each, top_k)


def check_output(
    inputs: ModelInputs,
    name: str,
    fields: Sequence[str],
    top_k: int | None,
    problems: Problems,
    pointers: tuple[str, str, str],
) -> None:
    """Check that an output exists and has what is wanted of it.

    ``pointers``: to the name of the output, to the fields, and to what has ``top_k``.
    """
    output = inputs.outputs.get(name)
    if output is None:
        problems.problem(pointers[0], _unknown(inputs, name), "unknown_layer")
        return
    if not output.has_rows:
        detail = f"the first axis of {name!r} is not the rows: ask for another layer"
        problems.problem(pointers[0], detail, "no_rows_axis")
        return
    size = output.num_classes
    beyond = [item for item in fields if item != "value"]
    if beyond and size is None:
        shape = ["rows", *(() if output.steps is None else ("steps",))]
        detail = f"{name!r} has shape {shape}: without a class axis it has no {beyond[0]}"
        problems.problem(pointers[1], detail, "no_class_axis")
    elif "top_k" in fields and top_k is not None and size is not None and 0 <= size < top_k:
        detail = f"top_k is {top_k}, and the last axis of {name!r} has {size} entries:"
        problems.problem(f"{pointers[2]}/top_k", f"{detail} set at most {size}", "too_large")


def entries(inputs: ModelInputs, name: str, top_k: int | None) -> int:
    """Return the number of entries of an output's field ``top_k``; -1: it depends on the rows."""
    size = inputs.outputs[name].num_classes or 0
    return size if size < 0 else min(size, TOP_K if top_k is None else top_k)


def _unknown(inputs: ModelInputs, name: str) -> str:
    shown = name[:100]
    leaves = [leaf for leaf in inputs.outputs if root(leaf) == root(name)]
    if leaves:
        return f"there is no {shown!r}; there is: {listed(leaves)}"
    if root(name) in inputs.trained_by.data.fields:
        return f"{shown!r} is a field that the network reads, and not a layer"
    layers = [layer.name for layer in inputs.trained_by.network.layers]
    detail = f"the network has no layer {shown!r}; it has: {listed(layers)}"
    return f"{detail}{similar(name, layers)}"


def _names(
    given: Mapping[str, Any], key: str, problems: Problems, base: str, most: int
) -> tuple[str, ...] | None:
    """Return a list of unique texts; None: there is none, or it is something else."""
    found = given.get(key)
    if found is None:
        return None
    pointer = f"{base}/{token(key)}"
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        problems.problem(pointer, f"{key} is not a list of names", "type")
    elif not found:
        problems.problem(pointer, f"{key} is empty: name one, or leave it out", "empty")
    elif len(found) > most:
        detail = f"{key} has {len(found):,} names: give at most {most:,}"
        problems.problem(pointer, detail, "too_many")
    elif len({*found}) < len(found):
        number, again = next(
            (number, item) for number, item in enumerate(found) if item in found[:number]
        )
        detail = f"{again[:100]!r} is listed twice: remove one"
        problems.problem(f"{pointer}/{number}", detail, "repeated")
    else:
        return tuple(found)
    return None
