"""Add the size to which images of an uploaded archive are resized."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("datasets", sa.Column("resize", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("datasets", "resize")
