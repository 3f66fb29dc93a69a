"""Add the number of stored shipments of an attempt."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "attempts", sa.Column("num_shipments", sa.Integer(), nullable=False, server_default="0")
    )


def downgrade() -> None:
    op.drop_column("attempts", "num_shipments")
