"""Checks that files and responses do not leak keys, passwords or internals of the service."""

import re
from pathlib import Path

import httpx2

KEY = re.compile(rb"gh_[0-9A-Za-z]{43}_[0-9A-Za-z]{6}")
INSIDE = re.compile(
    r"Traceback|site-packages|\.py\b.*line \d|sqlalchemy|sqlite3|psycopg|SELECT .* FROM|/tmp/gh"
)
_MAY_HOLD_A_KEY = frozenset({"runtime.json"})
"""Files for the owner of the home, mode 0600."""
_MAX_BYTES = 64 * 1024**2


def check_home(home: Path, *secrets: str) -> None:
    """Check that no file that a service leaves holds a key: logs, database, broker's files."""
    for path in sorted(home.rglob("*")):
        if path.name in _MAY_HOLD_A_KEY or path.is_symlink() or not path.is_file():
            continue
        if path.stat().st_size <= _MAX_BYTES:
            data = path.read_bytes()
            check_bytes(data, str(path), *secrets)
            assert b"UnpicklingRefused" not in data, f"{path}: something tried to open a pickle"


def check_bytes(data: bytes, where: str, *secrets: str) -> None:
    """Check that the data holds no key and none of these secrets."""
    found = KEY.search(data)
    assert found is None, f"{where} holds a key, near {data[max(0, found.start() - 100) :][:100]!r}"
    for secret in secrets:
        assert secret.encode() not in data, f"{where} holds a secret"


def check_answer(response: httpx2.Response) -> None:
    """Check that an error response reveals no internals. A hook of every test client."""
    if response.status_code < 400:
        return
    response.read()
    where = f"{response.request.method} {response.request.url.path} → {response.status_code}"
    check_bytes(response.content, where)
    found = INSIDE.search(response.text)
    assert found is None, f"{where} exposes internals: {found[0]!r}"
