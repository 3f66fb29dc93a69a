"""Alembic's environment. The connection comes from ``models.migrate``."""

from typing import Any

from alembic import context

from models.tables import Json, Table, Time


def _render(kind: str, value: Any, _context: Any) -> str | bool:
    """Render custom column types as the plain types they are stored as."""
    if kind == "type" and isinstance(value, Time):
        return "sa.BigInteger()"
    if kind == "type" and isinstance(value, Json):
        return "sa.Text()"
    return False


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Table.metadata,
    render_as_batch=True,
    render_item=_render,
    compare_type=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
