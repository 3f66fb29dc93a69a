"""Add quotas of owners."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "quotas",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("limits", sa.Text(), nullable=False),
        sa.Column("by", sa.Text(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("owner", name=op.f("pk_quotas")),
    )
    op.create_index(op.f("ix_jobs_owner_state"), "jobs", ["owner", "state"])


def downgrade() -> None:
    op.drop_index(op.f("ix_jobs_owner_state"), table_name="jobs")
    op.drop_table("quotas")
