"""Add pausing, and the changes that commands make."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


# Add columns one by one, not in a batch: on SQLite a batch may recreate the table of jobs.
# Dropping the old one would delete all data of the jobs through foreign keys.
_OF_JOBS = ("paused_at", "paused_ms", "resume_requested")
_OF_COMMANDS = ("old", "new", "number")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("paused_at", sa.BigInteger(), nullable=True))
    op.add_column(
        "jobs", sa.Column("paused_ms", sa.BigInteger(), nullable=False, server_default="0")
    )
    op.add_column(
        "jobs",
        sa.Column("resume_requested", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.add_column("commands", sa.Column("old", sa.Text(), nullable=True))
    op.add_column("commands", sa.Column("new", sa.Text(), nullable=True))
    number = sa.Column("number", sa.Integer(), nullable=False, server_default="0")
    op.add_column("commands", number)


def downgrade() -> None:
    for name in _OF_COMMANDS:
        op.drop_column("commands", name)
    for name in _OF_JOBS:
        op.drop_column("jobs", name)
