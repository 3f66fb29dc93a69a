"""Add columns for captures that are one of several tensors in a file, or a part of a tensor."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("captures", schema=None) as batch_op:
        batch_op.add_column(sa.Column("form", sa.Text(), nullable=True))
        batch_op.add_column(sa.Column("slice", sa.Text(), nullable=True))
        batch_op.add_column(sa.Column("captured_from", sa.Text(), nullable=True))
        batch_op.add_column(sa.Column("tensor", sa.Text(), nullable=True))
    # existing captures: files of one whole tensor
    op.execute("UPDATE captures SET form = 'full', captured_from = shape, tensor = 'tensor'")
    with op.batch_alter_table("captures", schema=None) as batch_op:
        for name in ("form", "captured_from", "tensor"):
            batch_op.alter_column(name, existing_type=sa.Text(), nullable=False)


def downgrade() -> None:
    with op.batch_alter_table("captures", schema=None) as batch_op:
        for name in ("form", "slice", "captured_from", "tensor"):
            batch_op.drop_column(name)
