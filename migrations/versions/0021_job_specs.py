"""Move specs and plans out of the rows of jobs, which are written often and must stay small."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

MOVED = ("spec", "resolved", "plan")


def upgrade() -> None:
    op.create_table(
        "job_specs",
        sa.Column("job", sa.Text(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in MOVED),
        sa.ForeignKeyConstraint(
            ["job"], ["jobs.id"], name=op.f("fk_job_specs_job_jobs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job", name=op.f("pk_job_specs")),
    )
    op.execute(
        "INSERT INTO job_specs (job, spec, resolved, plan) "
        "SELECT id, spec, resolved, plan FROM jobs"
    )
    op.add_column("jobs", sa.Column("warnings", sa.Text(), nullable=False, server_default="[]"))
    found = "json_extract(plan, '$.warnings')"
    if op.get_bind().dialect.name == "postgresql":
        found = "CAST(CAST(plan AS json) -> 'warnings' AS text)"
    op.execute(f"UPDATE jobs SET warnings = {found} WHERE {found} IS NOT NULL")  # noqa: S608
    for name in MOVED:
        op.drop_column("jobs", name)


def downgrade() -> None:
    for name in MOVED:
        op.add_column("jobs", sa.Column(name, sa.Text(), nullable=False, server_default="{}"))
        op.execute(
            f"UPDATE jobs SET {name} = "  # noqa: S608 (the names of three columns)
            f"(SELECT {name} FROM job_specs WHERE job_specs.job = jobs.id)"
        )
    op.drop_column("jobs", "warnings")
    op.drop_table("job_specs")
