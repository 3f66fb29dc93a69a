"""Add the API key that a session or a ticket came from, which was in its name until now."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("keys", sa.Column("parent", sa.Text(), nullable=True))
    op.execute("UPDATE keys SET parent = name WHERE kind IN ('session', 'ticket')")
    op.execute(
        "UPDATE keys SET name = key.name FROM (SELECT id, name FROM keys) AS key "
        "WHERE keys.parent = key.id"
    )
    op.create_index(op.f("ix_keys_parent"), "keys", ["parent"])


def downgrade() -> None:
    op.execute("UPDATE keys SET name = parent WHERE parent IS NOT NULL")
    op.drop_index(op.f("ix_keys_parent"), "keys")
    op.drop_column("keys", "parent")
