"""Turn uploaded checkpoints into rows of ``checkpoints`` without a job."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

SHARED = "id, owner, name, network, files, size_bytes, sha256, key, state, created_at"


def upgrade() -> None:
    with op.batch_alter_table("checkpoints") as checkpoints:
        for name, kind in (("job", sa.Text()), ("attempt", sa.Integer())):
            checkpoints.alter_column(name, existing_type=kind, nullable=True)
        for name in ("name", "network", "sha256"):
            checkpoints.add_column(sa.Column(name, sa.Text(), nullable=True))
    op.execute(
        f"INSERT INTO checkpoints ({SHARED}, step, epoch, final, metrics) "  # noqa: S608
        f"SELECT {SHARED}, 0, 0, true, '{{}}' FROM uploads"
    )
    op.drop_table("uploads")
    op.create_index(op.f("ix_checkpoints_owner_id"), "checkpoints", ["owner", "id"])
    op.create_index(op.f("ix_checkpoints_sha256"), "checkpoints", ["sha256"])


def downgrade() -> None:
    op.drop_index(op.f("ix_checkpoints_sha256"), "checkpoints")
    op.drop_index(op.f("ix_checkpoints_owner_id"), "checkpoints")
    op.create_table(
        "uploads",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("network", sa.Text(), nullable=False),
        sa.Column("files", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), server_default="complete", nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
    )
    op.create_index(op.f("ix_uploads_owner_id"), "uploads", ["owner", "id"])
    op.execute(
        f"INSERT INTO uploads ({SHARED}) SELECT {SHARED} "  # noqa: S608
        "FROM checkpoints WHERE job IS NULL"
    )
    op.execute("DELETE FROM checkpoints WHERE job IS NULL")
    with op.batch_alter_table("checkpoints") as checkpoints:
        for name in ("sha256", "network", "name"):
            checkpoints.drop_column(name)
        for name, kind in (("attempt", sa.Integer()), ("job", sa.Text())):
            checkpoints.alter_column(name, existing_type=kind, nullable=False)
