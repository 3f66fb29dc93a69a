"""Add probes that can be added, changed and removed while a job runs."""

import json

import sqlalchemy as sa
from alembic import op

from glasshouse.ids import new_id

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    table = op.create_table(
        "probes",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.Column("matched", sa.Text(), nullable=False),
        sa.Column("bytes_per_step", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("applied_step", sa.BigInteger(), nullable=True),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("by", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job"], ["jobs.id"], name=op.f("fk_probes_job_jobs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_probes")),
    )
    with op.batch_alter_table("probes", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_probes_job_position"), ["job", "position"])
    _copy_those_of_specs(table)


def _copy_those_of_specs(table: sa.Table) -> None:
    """Jobs that are there keep the probes of their specs."""
    connection = op.get_bind()
    ids = connection.execute(sa.text("SELECT id FROM jobs WHERE kind = 'train'")).scalars().all()
    query = sa.text("SELECT owner, resolved, plan, created_at FROM jobs WHERE id = :id")
    for job in ids:
        owner, resolved, plan, created_at = connection.execute(query, {"id": job}).one()
        planned = json.loads(plan).get("probes", [])
        rows = []
        for position, body in enumerate(json.loads(resolved).get("probes", [])):
            found = planned[position] if position < len(planned) else {}
            rows.append(
                {
                    "id": new_id("prb"),
                    "job": job,
                    "body": json.dumps(body),
                    "state": "active",
                    "problem": None,
                    "matched": json.dumps(found.get("matched", [])),
                    "bytes_per_step": found.get("bytes_per_step", 0),
                    "revision": 0,
                    "applied_step": 0,
                    "position": position,
                    "created_at": created_at,
                    "by": owner,
                }
            )
        if rows:
            connection.execute(table.insert(), rows)


def downgrade() -> None:
    with op.batch_alter_table("probes", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_probes_job_position"))

    op.drop_table("probes")
