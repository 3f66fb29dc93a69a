"""Add the worker that reads an uploaded file, and the end of its claim."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("datasets", sa.Column("reader", sa.Text(), nullable=True))
    op.add_column("datasets", sa.Column("reading_until_ms", sa.BigInteger(), nullable=True))
    op.add_column("datasets", sa.Column("reads", sa.Integer(), server_default="0", nullable=False))
    op.create_index(op.f("ix_datasets_state"), "datasets", ["state"])


def downgrade() -> None:
    op.drop_index(op.f("ix_datasets_state"), "datasets")
    for name in ("reads", "reading_until_ms", "reader"):
        op.drop_column("datasets", name)
