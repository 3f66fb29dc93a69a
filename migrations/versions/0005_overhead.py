"""What watching costs: of a job, and of each of its probes."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.add_column(sa.Column("probe_overhead", sa.Text(), nullable=True))
    with op.batch_alter_table("probes", schema=None) as batch_op:
        batch_op.add_column(sa.Column("estimated_cost_s", sa.Float(53), nullable=True))
        batch_op.add_column(sa.Column("cost_s", sa.Float(53), nullable=True))
        batch_op.add_column(sa.Column("every_now", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("probes", schema=None) as batch_op:
        batch_op.drop_column("every_now")
        batch_op.drop_column("cost_s")
        batch_op.drop_column("estimated_cost_s")
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.drop_column("probe_overhead")
