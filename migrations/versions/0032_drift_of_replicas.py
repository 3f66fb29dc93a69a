"""Drift: how the rows that a replica is served differ from the training rows."""

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("replicas") as table:
        table.add_column(sa.Column("drift", sa.Text(), server_default="[]", nullable=False))


def downgrade() -> None:
    with op.batch_alter_table("replicas") as table:
        table.drop_column("drift")
