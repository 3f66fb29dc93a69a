"""Add the process that a worker's row belongs to, and when the worker was stopped."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workers", sa.Column("instance", sa.Text(), server_default="", nullable=False))
    op.add_column("workers", sa.Column("stopped_ms", sa.BigInteger(), nullable=True))
    # until now a heartbeat of 0 marked a stopped worker
    op.execute("UPDATE workers SET stopped_ms = started_at, beat_ms = started_at WHERE beat_ms = 0")


def downgrade() -> None:
    op.execute("UPDATE workers SET beat_ms = 0 WHERE stopped_ms IS NOT NULL")
    op.drop_column("workers", "stopped_ms")
    op.drop_column("workers", "instance")
