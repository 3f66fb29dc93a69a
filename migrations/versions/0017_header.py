"""Add whether a table's first row is its header, and the reader's notes about a file."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("datasets", sa.Column("header", sa.Boolean(), nullable=True))
    op.add_column("datasets", sa.Column("notes", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("datasets", "notes")
    op.drop_column("datasets", "header")
