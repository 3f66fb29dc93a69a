"""Add rollups of long series over a thousand steps."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

COUNT_WHAT_IS_THERE = """
INSERT INTO metric_spans
    (job, name, number, attempt, num_values, low, high, first_nonfinite_step, last_step)
SELECT job, name, step / 1000, attempt, count(*), min(value), max(value),
    min(CASE WHEN nonfinite IS NOT NULL THEN step END), max(step)
FROM metrics GROUP BY job, name, step / 1000, attempt
"""


def upgrade() -> None:
    op.create_table(
        "metric_spans",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("num_values", sa.Integer(), nullable=False),
        sa.Column("low", sa.Float(precision=53), nullable=True),
        sa.Column("high", sa.Float(precision=53), nullable=True),
        sa.Column("first_nonfinite_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job"], ["jobs.id"], name=op.f("fk_metric_spans_job_jobs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job", "name", "number", "attempt", name=op.f("pk_metric_spans")),
    )
    op.execute(COUNT_WHAT_IS_THERE)


def downgrade() -> None:
    op.drop_table("metric_spans")
