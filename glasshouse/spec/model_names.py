"""Names of published models and of their aliases, and references to a version of a model.

A reference is ``mnist`` (the newest version), ``mnist@production`` (the version that the alias
names) or ``mnist:3``. It may stand wherever a spec takes the id of a checkpoint.
"""

import re
from typing import Annotated, NamedTuple

from pydantic import AfterValidator
from pydantic import Field as Constraint

MODEL_NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$"
LATEST = "latest"
"""The alias of the newest version of each model."""
MAX_VERSION = 999_999_999
_IDS = ("ckpt_", "job_", "mdl_")
"""Beginnings of ids that may stand where a model may: a name never looks like one of them."""
_WORD = MODEL_NAME_PATTERN.strip("^$")
_REFERENCE = re.compile(rf"({_WORD})(?:@({_WORD})|:([0-9]{{1,9}}))?")


def check_model_name(name: str) -> str:
    """Return the name of a model that has the right characters.

    Raises:
        ValueError: it begins like the id of another resource.
    """
    if name.startswith(_IDS):
        detail = f"{name[:40]!r} begins like an id ({', '.join(_IDS)}): choose another name"
        raise ValueError(detail)
    return name


def check_alias(alias: str) -> str:
    """Return an alias that has the right characters.

    Raises:
        ValueError: it would be the number of a version, or is reserved.
    """
    if alias == LATEST:
        raise ValueError(f"{LATEST!r} always names the newest version: choose another alias")
    if alias.isdigit():
        detail = f"{alias[:40]!r} has only digits, like the number of a version"
        raise ValueError(f"{detail}: choose another alias, such as 'v{alias[:20]}'")
    return alias


ModelName = Annotated[str, Constraint(pattern=MODEL_NAME_PATTERN), AfterValidator(check_model_name)]
"""The name of a published model."""

Alias = Annotated[str, Constraint(pattern=MODEL_NAME_PATTERN), AfterValidator(check_alias)]
"""A name for one version of a model."""


class ModelReference(NamedTuple):
    """A version of a model: by an alias, by its number, or the newest one."""

    name: str
    alias: str | None = None
    number: int | None = None

    @property
    def version(self) -> str | None:
        """The alias or the number as text; None: the newest."""
        return self.alias if self.number is None else str(self.number)


def parse_model_reference(text: str) -> ModelReference | None:
    """Read ``name``, ``name@alias`` or ``name:version``; None if the text is none of them."""
    found = _REFERENCE.fullmatch(text)
    if found is None or text.startswith(_IDS):
        return None
    name, alias, number = found.groups()
    return ModelReference(name, alias, None if number is None else int(number))


def canonical(reference: str) -> str:
    """Return a reference in the form in which serve jobs name it: ``name@latest`` is ``name``."""
    return reference.removesuffix(f"@{LATEST}")
