"""Add a table of labels, a mark for deleted jobs, and missing indexes."""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

MARKED = sa.text("deleted_at IS NOT NULL")
_AT_ONCE = 1000


def upgrade() -> None:
    op.create_table(
        "job_labels",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job"], ["jobs.id"], name=op.f("fk_job_labels_job_jobs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job", "name", name=op.f("pk_job_labels")),
    )
    _copy_labels(op.get_bind())
    op.create_index(op.f("ix_job_labels_name_value_job"), "job_labels", ["name", "value", "job"])
    op.add_column("jobs", sa.Column("deleted_at", sa.BigInteger(), nullable=True))
    op.create_index(
        op.f("ix_jobs_deleted_at"),
        "jobs",
        ["deleted_at"],
        sqlite_where=MARKED,
        postgresql_where=MARKED,
    )
    op.create_index(op.f("ix_jobs_parent_id"), "jobs", ["parent", "id"])
    op.create_index(op.f("ix_jobs_ended_at_id"), "jobs", ["ended_at", "id"])
    op.create_index(op.f("ix_attempts_exit_kind"), "attempts", ["exit_kind"])
    op.create_index(op.f("ix_idempotency_created_at"), "idempotency", ["created_at"])


def _copy_labels(connection: sa.Connection) -> None:
    """Read jobs by their ids, some at a time: there may be many."""
    page = sa.text("SELECT id, labels FROM jobs WHERE id > :last ORDER BY id LIMIT :limit")
    insert = sa.text("INSERT INTO job_labels (job, name, value) VALUES (:job, :name, :value)")
    last = ""
    while jobs := connection.execute(page, {"last": last, "limit": _AT_ONCE}).all():
        last = jobs[-1].id
        rows: list[dict[str, Any]] = [
            {"job": job.id, "name": name, "value": value}
            for job in jobs
            for name, value in json.loads(job.labels).items()
        ]
        if rows:
            connection.execute(insert, rows)


def downgrade() -> None:
    # an older version would show deleted jobs again
    op.execute("DELETE FROM jobs WHERE deleted_at IS NOT NULL")
    op.drop_index(op.f("ix_idempotency_created_at"), table_name="idempotency")
    op.drop_index(op.f("ix_attempts_exit_kind"), table_name="attempts")
    op.drop_index(op.f("ix_jobs_ended_at_id"), table_name="jobs")
    op.drop_index(op.f("ix_jobs_parent_id"), table_name="jobs")
    op.drop_index(op.f("ix_jobs_deleted_at"), table_name="jobs")
    op.drop_column("jobs", "deleted_at")
    op.drop_table("job_labels")
