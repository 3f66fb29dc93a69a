"""An attempt whose fork server died ends as ``fork_server_lost``."""

from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _rename("nursery_lost", "fork_server_lost")


def downgrade() -> None:
    _rename("fork_server_lost", "nursery_lost")


def _rename(old: str, new: str) -> None:
    op.execute(f"UPDATE attempts SET exit_kind = '{new}' WHERE exit_kind = '{old}'")  # noqa: S608
