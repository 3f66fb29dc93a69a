"""Add columns for attempts that resume from a checkpoint and hide rows of earlier attempts."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

# Add columns one by one, not in a batch: on SQLite a batch may recreate the table.
# Dropping the old one would delete all dependent rows through foreign keys.
_STEP = {
    "sqlite": "json_extract(payload, '$.step')",
    "postgresql": "CAST(CAST(payload AS json) ->> 'step' AS BIGINT)",
}


def upgrade() -> None:
    op.add_column("attempts", sa.Column("checkpoint", sa.Text(), nullable=True))
    op.add_column("events", sa.Column("step", sa.BigInteger(), nullable=True))
    op.add_column("job_artifacts", sa.Column("attempt", sa.Integer(), nullable=True))
    op.add_column("job_artifacts", sa.Column("step", sa.BigInteger(), nullable=True))
    op.add_column(
        "checkpoints", sa.Column("state", sa.Text(), nullable=False, server_default="complete")
    )
    # until now every later attempt started from scratch, with null
    op.execute(
        "UPDATE attempts SET resumed_from_step = 0"
        " WHERE n > 1 AND resumed_from_step IS NULL AND claimed_at IS NOT NULL"
    )
    step = _STEP[op.get_bind().dialect.name]
    again = "job IN (SELECT job FROM attempts WHERE n > 1)"
    told = "('metrics', 'stats', 'capture', 'adjusted')"
    op.execute(f"UPDATE events SET step = {step} WHERE {again} AND type IN {told}")  # noqa: S608
    op.execute(f"UPDATE events SET step = {step} - 1 WHERE {again} AND type = 'checkpoint'")  # noqa: S608


def downgrade() -> None:
    op.drop_column("checkpoints", "state")
    op.drop_column("job_artifacts", "step")
    op.drop_column("job_artifacts", "attempt")
    op.drop_column("events", "step")
    op.drop_column("attempts", "checkpoint")
