"""Replicas: which serve job a further one belongs to, and what decides on their number."""

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("replicas", sa.Column("parent", sa.Text(), nullable=True))
    op.add_column("replicas", sa.Column("scaling", sa.Text(), server_default="{}", nullable=False))
    op.create_index(op.f("ix_replicas_parent"), "replicas", ["parent"])


def downgrade() -> None:
    op.drop_index(op.f("ix_replicas_parent"), "replicas")
    op.drop_column("replicas", "scaling")
    op.drop_column("replicas", "parent")
