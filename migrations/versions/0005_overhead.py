"""Add the cost of watching to jobs and probes."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


# Add columns one by one, not in a batch: on SQLite a batch may recreate the table of jobs.
# Dropping the old one would delete all data of the jobs through foreign keys.
_OF_PROBES = ("estimated_cost_s", "cost_s", "every_now")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("probe_overhead", sa.Text(), nullable=True))
    op.add_column("probes", sa.Column("estimated_cost_s", sa.Float(53), nullable=True))
    op.add_column("probes", sa.Column("cost_s", sa.Float(53), nullable=True))
    op.add_column("probes", sa.Column("every_now", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    for name in _OF_PROBES:
        op.drop_column("probes", name)
    op.drop_column("jobs", "probe_overhead")
