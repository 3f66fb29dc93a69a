"""Published models: numbered versions of checkpoints under a name, and aliases of versions."""

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "models",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("last_version", sa.Integer(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_models")),
    )
    op.create_index(op.f("ix_models_owner_id"), "models", ["owner", "id"])
    op.create_index(op.f("ix_models_owner_name"), "models", ["owner", "name"], unique=True)
    op.create_table(
        "model_versions",
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("checkpoint", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["checkpoint"],
            ["checkpoints.id"],
            name=op.f("fk_model_versions_checkpoint_checkpoints"),
        ),
        sa.ForeignKeyConstraint(
            ["model"],
            ["models.id"],
            name=op.f("fk_model_versions_model_models"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("model", "number", name=op.f("pk_model_versions")),
    )
    op.create_index(op.f("ix_model_versions_checkpoint"), "model_versions", ["checkpoint"])
    op.create_table(
        "model_aliases",
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model", "number"],
            ["model_versions.model", "model_versions.number"],
            name=op.f("fk_model_aliases_model_number_model_versions"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("model", "name", name=op.f("pk_model_aliases")),
    )


def downgrade() -> None:
    op.drop_table("model_aliases")
    op.drop_index(op.f("ix_model_versions_checkpoint"), "model_versions")
    op.drop_table("model_versions")
    op.drop_index(op.f("ix_models_owner_name"), "models")
    op.drop_index(op.f("ix_models_owner_id"), "models")
    op.drop_table("models")
