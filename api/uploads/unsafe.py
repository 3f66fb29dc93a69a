"""Files that run code when they are opened: known by their names and first bytes, and refused.

Nothing of the service would open one. They are refused by name, so that nobody thinks that they are
a format that is merely missing.
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
# A pickle of protocol 2 to 5 says so in its first two bytes; torch's old files begin with one.
_PICKLE = re.compile(rb"\x80[\x02-\x05][\x00-\xff]")
# torch's files of today are zip archives with a pickle of this name as the first member.
_TORCH_ZIP = re.compile(rb"PK\x03\x04.{26}[^/\x00]{0,100}/data\.pkl", re.DOTALL)


def refuse_name(name: str | None) -> None:
    """Refuse a format by its name.

    Raises:
        UnsafeFormat: files of this format run code when they are opened.
    """
    if name is not None and name.strip().lower().lstrip(".") in _NAMES:
        raise UnsafeFormat(f"Files of the format {name[:40]!r} run code when they are opened.")


def refuse_beginning(data: bytes) -> None:
    """Refuse a file by its first bytes, whatever format it is said to be.

    Raises:
        UnsafeFormat: it is a pickle, or a file of torch.save, which holds one.
    """
    if _PICKLE.match(data) or _TORCH_ZIP.match(data):
        raise UnsafeFormat("The file is a pickle, which runs code when it is opened.")
