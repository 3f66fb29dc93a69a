"""Add chunks of statistics with one series each. Existing blocks stay readable."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    form = sa.Column("form", sa.Text(), server_default="stats", nullable=False)
    op.add_column("stats_blocks", form)
    op.create_table(
        "stats_series",
        sa.Column("id", _NUMBER, autoincrement=True, nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("form", sa.Text(), nullable=False),
        sa.Column("layer", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("last", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job"], ["jobs.id"], name=op.f("fk_stats_series_job_jobs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stats_series")),
    )
    with op.batch_alter_table("stats_series", schema=None) as batch_op:
        batch_op.create_index(
            batch_op.f("ix_stats_series_job_attempt_form_layer_kind_phase"),
            ["job", "attempt", "form", "layer", "kind", "phase"],
            unique=True,
        )
    op.create_table(
        "stats_chunks",
        sa.Column("series", _NUMBER, nullable=False),
        sa.Column("fold", sa.Integer(), nullable=False),
        sa.Column("from_step", sa.BigInteger(), nullable=False),
        sa.Column("to_step", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["series"],
            ["stats_series.id"],
            name=op.f("fk_stats_chunks_series_stats_series"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("series", "fold", name=op.f("pk_stats_chunks")),
    )
    op.create_table(
        "stats_folds",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job"], ["jobs.id"], name=op.f("fk_stats_folds_job_jobs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job", "n", name=op.f("pk_stats_folds")),
    )


def downgrade() -> None:
    """What was folded is lost."""
    op.drop_table("stats_folds")
    op.drop_table("stats_chunks")
    op.drop_table("stats_series")
    with op.batch_alter_table("stats_blocks", schema=None) as batch_op:
        batch_op.drop_column("form")
