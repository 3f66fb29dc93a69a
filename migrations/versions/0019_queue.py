"""Add a column for the devices that a queued job asks for; drop what the sweep no longer needs."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

jobs = sa.table(
    "jobs", sa.column("id"), sa.column("state"), sa.column("resolved"), sa.column("wants")
)
ENDED = ("succeeded", "failed", "cancelled")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("wants", sa.Text(), server_default="{}", nullable=False))
    connection = op.get_bind()
    left = sa.select(jobs.c.id, jobs.c.resolved).where(jobs.c.state.not_in(ENDED))
    for job, resolved in connection.execute(left).all():
        wants = json.dumps(json.loads(resolved).get("devices", {}), separators=(",", ":"))
        connection.execute(jobs.update().where(jobs.c.id == job).values(wants=wants))
    op.drop_column("jobs", "rung_at")
    op.drop_table("outbox")


def downgrade() -> None:
    op.create_table(
        "outbox",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
    )
    op.add_column("jobs", sa.Column("rung_at", sa.BigInteger(), nullable=True))
    op.drop_column("jobs", "wants")
