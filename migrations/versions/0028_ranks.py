"""Statistics and tensors of single processes of a job; -1 is all of them together."""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

_INDEX = "ix_stats_series_job_attempt_form_layer_kind_phase"
_COLUMNS = ["job", "attempt", "form", "layer", "kind", "phase"]


def upgrade() -> None:
    for table in ("stats_series", "captures"):
        rank = sa.Column("rank", sa.Integer(), server_default="-1", nullable=False)
        op.add_column(table, rank)
    op.drop_index(_INDEX, "stats_series")
    op.create_index(f"{_INDEX}_rank", "stats_series", [*_COLUMNS, "rank"], unique=True)


def downgrade() -> None:
    """What was recorded of single processes is lost. Jobs that record it must have ended."""
    op.execute(
        "DELETE FROM stats_chunks WHERE series IN (SELECT id FROM stats_series WHERE rank >= 0)"
    )
    op.execute("DELETE FROM stats_series WHERE rank >= 0")
    op.execute("DELETE FROM captures WHERE rank >= 0")
    op.drop_index(f"{_INDEX}_rank", "stats_series")
    op.create_index(_INDEX, "stats_series", _COLUMNS, unique=True)
    for table in ("stats_series", "captures"):
        op.drop_column(table, "rank")
