"""Initial schema: every table of `pilotlight.controller.database.tables`, one function each."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_AUDIT_IS_APPEND_ONLY = {
    "sqlite": [
        """CREATE TRIGGER audit_no_update BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, 'audit is append-only'); END""",
        """CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit BEGIN SELECT RAISE(ABORT, 'audit is append-only'); END""",
    ],
    "postgresql": [
        """CREATE FUNCTION audit_refuse() RETURNS trigger LANGUAGE plpgsql
           AS $$ BEGIN RAISE EXCEPTION 'audit is append-only'; END $$""",
        """CREATE TRIGGER audit_no_change BEFORE UPDATE OR DELETE ON audit FOR EACH ROW EXECUTE FUNCTION audit_refuse()""",
    ],
}


def upgrade() -> None:
    """Create all tables, and the feed's state row: it begins at 1, because position 0 means "from
    the start"."""
    _audit()
    _blobs()
    _calls()
    _feed()
    _feed_state()
    _tenants()
    _usage()
    _api_keys()
    _blob_owners()
    _environments()
    _images()
    _apps()
    _secrets()
    _deployments()
    _functions()
    _revisions()
    _traffic()
    op.execute("INSERT INTO feed_state (id, head, purged, generation) VALUES (1, 1, 0, 0)")
    for statement in _AUDIT_IS_APPEND_ONLY[op.get_bind().dialect.name]:
        op.execute(statement)


def _audit() -> None:
    op.create_table(
        "audit",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("before", sa.Text(), nullable=True),
        sa.Column("after", sa.Text(), nullable=True),
        sa.Column("request", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_index("ix_audit_tenant_id", "audit", ["tenant", "id"], unique=False)


def _blobs() -> None:
    op.create_table(
        "blobs",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_blobs")),
    )


def _calls() -> None:
    op.create_table(
        "calls",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("app", sa.Text(), nullable=False),
        sa.Column("function", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("submitted_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "id", name=op.f("pk_calls")),
    )
    op.create_index("ix_calls_expires_at", "calls", ["expires_at"], unique=False)
    op.create_index(
        "ix_calls_tenant_submitted_at", "calls", ["tenant", "submitted_at"], unique=False
    )


def _feed() -> None:
    op.create_table(
        "feed",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("value", sa.Text(), nullable=True),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "key", name=op.f("pk_feed")),
        sa.UniqueConstraint("seq", name=op.f("uq_feed_seq")),
    )


def _feed_state() -> None:
    op.create_table(
        "feed_state",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("head", sa.BigInteger(), nullable=False),
        sa.Column("purged", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_feed_state")),
    )


def _tenants() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("uid", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
        sa.UniqueConstraint("uid", name=op.f("uq_tenants_uid")),
    )


def _usage() -> None:
    op.create_table(
        "usage",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("call", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("app", sa.Text(), nullable=False),
        sa.Column("function", sa.Text(), nullable=False),
        sa.Column("function_id", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("revision", sa.Text(), nullable=False),
        sa.Column("instance", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("start_kind", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("price_version", sa.Text(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("rate_per_s", sa.Text(), nullable=False),
        sa.Column("cost", sa.Text(), nullable=False),
        sa.Column("gpu", sa.Text(), nullable=True),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("queued_ms", sa.BigInteger(), nullable=False),
        sa.Column("start_ms", sa.BigInteger(), nullable=False),
        sa.Column("exec_ms", sa.BigInteger(), nullable=False),
        sa.Column("billed_ns", sa.BigInteger(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("gpu_count", sa.BigInteger(), nullable=False),
        sa.Column("tokens_in", sa.BigInteger(), nullable=False),
        sa.Column("tokens_out", sa.BigInteger(), nullable=False),
        sa.Column("bytes_in", sa.BigInteger(), nullable=False),
        sa.Column("bytes_out", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.BigInteger(), nullable=False),
        sa.Column("cpu", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("received_at", sa.Double(), nullable=False),
        sa.Column("cost_picos", sa.BigInteger(), nullable=False),
        sa.Column("day", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage")),
    )
    op.create_index("ix_usage_tenant_call", "usage", ["tenant", "call"], unique=False)
    op.create_index(
        "ix_usage_tenant_environment_app_function_started_at",
        "usage",
        ["tenant", "environment", "app", "function", "started_at"],
        unique=False,
    )
    op.create_index("ix_usage_tenant_started_at", "usage", ["tenant", "started_at"], unique=False)


def _api_keys() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=True),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_api_keys_tenant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("hash", name=op.f("uq_api_keys_hash")),
    )
    op.create_index(op.f("ix_api_keys_tenant"), "api_keys", ["tenant"], unique=False)


def _blob_owners() -> None:
    op.create_table(
        "blob_owners",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["digest"], ["blobs.digest"], name=op.f("fk_blob_owners_digest")),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_blob_owners_tenant")),
        sa.PrimaryKeyConstraint("tenant", "digest", name=op.f("pk_blob_owners")),
    )


def _environments() -> None:
    op.create_table(
        "environments",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_environments_tenant")),
        sa.PrimaryKeyConstraint("tenant", "name", name=op.f("pk_environments")),
    )


def _images() -> None:
    op.create_table(
        "images",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_images_tenant")),
        sa.PrimaryKeyConstraint("tenant", "digest", name=op.f("pk_images")),
    )


def _apps() -> None:
    op.create_table(
        "apps",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("stopped", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("deleted_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant", "environment"],
            ["environments.tenant", "environments.name"],
            name=op.f("fk_apps_tenant_environment"),
        ),
        sa.PrimaryKeyConstraint("tenant", "environment", "name", name=op.f("pk_apps")),
    )


def _secrets() -> None:
    op.create_table(
        "secrets",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("sealed", sa.Text(), nullable=False),
        sa.Column("variables", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant", "environment"],
            ["environments.tenant", "environments.name"],
            name=op.f("fk_secrets_tenant_environment"),
        ),
        sa.PrimaryKeyConstraint("tenant", "environment", "name", name=op.f("pk_secrets")),
    )


def _deployments() -> None:
    op.create_table(
        "deployments",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("app", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("functions", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant", "environment", "app"],
            ["apps.tenant", "apps.environment", "apps.name"],
            name=op.f("fk_deployments_tenant_environment_app"),
        ),
        sa.PrimaryKeyConstraint(
            "tenant", "environment", "app", "version", name=op.f("pk_deployments")
        ),
    )


def _functions() -> None:
    op.create_table(
        "functions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("app", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("revisions", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("removed_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant", "environment", "app"],
            ["apps.tenant", "apps.environment", "apps.name"],
            name=op.f("fk_functions_tenant_environment_app"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_functions")),
        sa.UniqueConstraint(
            "tenant",
            "environment",
            "app",
            "name",
            name=op.f("uq_functions_tenant_environment_app_name"),
        ),
    )


def _revisions() -> None:
    op.create_table(
        "revisions",
        sa.Column("function", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["function"], ["functions.id"], name=op.f("fk_revisions_function")),
        sa.PrimaryKeyConstraint("function", "name", name=op.f("pk_revisions")),
        sa.UniqueConstraint("function", "digest", name=op.f("uq_revisions_function_digest")),
    )


def _traffic() -> None:
    op.create_table(
        "traffic",
        sa.Column("function", sa.Text(), nullable=False),
        sa.Column("revision", sa.Text(), nullable=False),
        sa.Column("weight", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["function", "revision"],
            ["revisions.function", "revisions.name"],
            name=op.f("fk_traffic_function_revision"),
        ),
        sa.PrimaryKeyConstraint("function", "revision", name=op.f("pk_traffic")),
    )
