"""Give every job a name, with an index on it."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "name_counters",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("stem", sa.Text(), nullable=False),
        sa.Column("last", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "stem", name=op.f("pk_name_counters")),
    )
    op.create_index(op.f("ix_jobs_owner_name"), "jobs", ["owner", "name"])
    # existing jobs, in order of creation: train-1, train-2, infer-1 ...
    op.execute(
        "UPDATE jobs SET name = numbered.name FROM ("
        "SELECT id, "
        "kind || '-' || row_number() OVER (PARTITION BY owner, kind ORDER BY id) AS name "
        "FROM jobs WHERE name IS NULL) AS numbered WHERE jobs.id = numbered.id"
    )
    op.execute(
        "INSERT INTO name_counters (owner, stem, last) "
        "SELECT owner, kind, count(*) FROM jobs WHERE name LIKE kind || '-%' GROUP BY owner, kind"
    )


def downgrade() -> None:
    op.drop_index(op.f("ix_jobs_owner_name"), "jobs")
    op.drop_table("name_counters")
