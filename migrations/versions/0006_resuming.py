"""Attempts that go on from a checkpoint: what they hide of the attempts before."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

# Column by column, never by a batch: on SQLite that may make a new table and drop the old one, and
# with it, by their foreign keys, everything that belongs to it.
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
    # until now every later attempt began from scratch, and said null
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
