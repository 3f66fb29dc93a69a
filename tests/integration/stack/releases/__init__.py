"""A release's data, kept for the tests of upgrades: rows, files, and what its API said of them.

``python -m tests.integration.stack.releases FILE``, in a checkout of a release, runs a service with
jobs, kills it while one of them runs, and writes what it has stored. Do so at each release.
"""

import base64
import io
import json
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

from sqlalchemy import Connection, LargeBinary, MetaData, Table, func, inspect, select, text

HERE = Path(__file__).parent
PREVIOUS = HERE / "0016.zip"
"""Of the newest release: the schema revision 0016."""


def write(file: Path, connection: Connection, artifacts: Path, said: dict[str, Any]) -> None:
    """Write all rows of a database, the files that it names, and what the API said."""
    tables = MetaData()
    tables.reflect(connection)
    rows = {
        table.name: [dict(row) for row in connection.execute(table.select()).mappings()]
        for table in tables.sorted_tables
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rows.json", json.dumps(rows, default=_as_text, indent=1))
        archive.writestr("said.json", json.dumps(said, indent=1))
        for path in sorted(artifacts.rglob("*")):
            if path.is_file():
                archive.write(path, f"artifacts/{path.relative_to(artifacts).as_posix()}")


def said(file: Path) -> dict[str, Any]:
    """What the API of the release said: of each path its answer; ``key``, ``job``, ``running`` …"""
    with zipfile.ZipFile(file) as archive:
        return json.loads(archive.read("said.json"))


def unpack_files(file: Path, artifacts: Path) -> None:
    """Write the files where a service has them."""
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            if name.startswith("artifacts/"):
                place = artifacts / PurePosixPath(name).relative_to("artifacts")
                place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                place.write_bytes(archive.read(name))


def insert_rows(file: Path, connection: Connection) -> None:
    """Put the rows into the tables of the release's own revision."""
    with zipfile.ZipFile(file) as archive:
        rows = json.load(io.TextIOWrapper(archive.open("rows.json")))
    tables = MetaData()
    tables.reflect(connection)
    for table in tables.sorted_tables:
        if rows[table.name] and table.name != "alembic_version":
            connection.execute(table.insert(), [_read(table, row) for row in rows[table.name]])
        _count_on(connection, table)


def _count_on(connection: Connection, table: Table) -> None:
    """Numbers that PostgreSQL gives out begin after those that are there."""
    if connection.dialect.name != "postgresql":
        return
    for column in inspect(connection).get_columns(table.name):
        if "nextval" in str(column["default"]):
            sequence = f"pg_get_serial_sequence('{table.name}', '{column['name']}')"
            next_one = func.coalesce(func.max(table.c[column["name"]]), 0) + 1
            connection.execute(select(func.setval(text(sequence), next_one, False)))


def _read(table: Table, row: dict[str, Any]) -> dict[str, Any]:
    binary = {column.name for column in table.columns if isinstance(column.type, LargeBinary)}
    return {
        name: base64.b64decode(value) if name in binary and value is not None else value
        for name, value in row.items()
    }


def _as_text(value: Any) -> str:
    return base64.b64encode(value).decode()
