"""The environment of processes that the API starts: no secrets."""

import os
import sys

_ALLOWED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "LD_LIBRARY_PATH", "TZ")


def clean_environment(**changes: str) -> dict[str, str]:
    """Return the allow-listed variables with these changes, and this process's module path."""
    kept = {name: os.environ[name] for name in _ALLOWED if name in os.environ}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return kept | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | changes
