"""Add the name of the key that submitted a job."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("created_by", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "created_by")
