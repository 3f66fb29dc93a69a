"""Refuse files that run code when they are opened, by their names and first bytes.

The service would not open them anyway. They are refused by name, so that users do not take them for
a format that is only missing.
"""

import re

from glasshouse.errors import UnsafeFormat

LOOKED_AT_BYTES = 256
_NAMES = frozenset(
    {
        "pickle",
        "pkl",
        "pt",
        "pth",
        "ckpt",
        "torch",
        "joblib",
        "dill",
        "cloudpickle",
        "marshal",
        "keras",
        "sav",
    }
)
# A pickle of protocol 2 to 5 starts with these two bytes; old torch files start with a pickle.
_PICKLE = re.compile(rb"\x80[\x02-\x05][\x00-\xff]")
# Current torch files are zip archives with a pickle of this name as the first member.
_TORCH_ZIP = re.compile(rb"PK\x03\x04.{26}[^/\x00]{0,100}/data\.pkl", re.DOTALL)


def refuse_name(name: str | None) -> None:
    """Refuse a format by its name.

    Raises:
        UnsafeFormat: Files of this format run code when they are opened.
    """
    if name is not None and name.strip().lower().lstrip(".") in _NAMES:
        raise UnsafeFormat(f"Files of the format {name[:40]!r} run code when they are opened.")


def refuse_beginning(data: bytes) -> None:
    """Refuse a file by its first bytes, whatever format was declared.

    Raises:
        UnsafeFormat: It is a pickle, or a file of torch.save, which contains one.
    """
    if _PICKLE.match(data) or _TORCH_ZIP.match(data):
        raise UnsafeFormat("The file is a pickle, which runs code when it is opened.")
