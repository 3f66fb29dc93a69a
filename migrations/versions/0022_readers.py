"""Which worker reads an uploaded file, and until when it may."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("datasets") as table:
        table.add_column(sa.Column("reader", sa.Text(), nullable=True))
        table.add_column(sa.Column("reading_until_ms", sa.BigInteger(), nullable=True))
        table.add_column(sa.Column("reads", sa.Integer(), server_default="0", nullable=False))
    op.create_index(op.f("ix_datasets_state"), "datasets", ["state"])


def downgrade() -> None:
    op.drop_index(op.f("ix_datasets_state"), "datasets")
    with op.batch_alter_table("datasets") as table:
        table.drop_column("reads")
        table.drop_column("reading_until_ms")
        table.drop_column("reader")
