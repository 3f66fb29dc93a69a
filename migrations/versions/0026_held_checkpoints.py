"""Hold a checkpoint for which a job is being submitted, so that it is not superseded."""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("held_until_ms", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("checkpoints", "held_until_ms")
