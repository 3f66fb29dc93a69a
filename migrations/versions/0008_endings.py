"""Add the time of the next retry of a failed job, and the step since which failures count."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


# Column by column, as in 0005.
def upgrade() -> None:
    op.add_column("jobs", sa.Column("failed_at_step", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("not_before_ms", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "not_before_ms")
    op.drop_column("jobs", "failed_at_step")
