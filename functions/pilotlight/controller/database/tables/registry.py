"""Tables of tenants, apps, revisions, keys, files, and of the activators' feed."""

from __future__ import annotations

import sqlalchemy as sa

from pilotlight.controller.database.tables.columns import metadata, text, time, whole

platform = sa.Table("platform", metadata, text("id", key=True), time("created_at"))
"""One row, made with the database: the id that labels this platform's objects in a cluster."""

adopted_platforms = sa.Table(
    "adopted_platforms", metadata, text("id", key=True), time("adopted_at"), text("adopted_by")
)
"""Ids of platforms whose objects in the cluster this one took over."""

tenants = sa.Table(
    "tenants",
    metadata,
    text("id", key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("uid", sa.BigInteger, unique=True),
    time("created_at"),
    sa.Column("plan", sa.Text, nullable=False, server_default="enterprise"),
    sa.Column("overrides", sa.Text, nullable=False, server_default="{}"),
    time("suspended_at", null=True),
    sa.Column("stored_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("collection_bytes", sa.BigInteger, nullable=False, server_default="0"),
    time("deleted_at", null=True),
)
"""`deleted_at`: since when it is deleted; its row stays, so that its name is given to no other
tenant while its invoices are kept."""

tenant_deletions = sa.Table(
    "tenant_deletions",
    metadata,
    text("tenant", sa.ForeignKey("tenants.id"), key=True),
    *(text(name) for name in ("state", "requested_by", "counts", "waiting_for")),
    *(time(name) for name in ("began_at", "updated_at")),
    time("finished_at", null=True),
    sa.Index("ix_tenant_deletions_state", "state"),
)
"""How far the deletion of a tenant is (`controller.tenant_deletion`). `counts`: rows that were
deleted by table, as JSON. `waiting_for`: why its step is repeated; "" = it is not."""

environments = sa.Table(
    "environments",
    metadata,
    text("tenant", sa.ForeignKey("tenants.id"), key=True),
    text("name", key=True),
    time("created_at"),
)

apps = sa.Table(
    "apps",
    metadata,
    text("tenant", key=True),
    text("environment", key=True),
    text("name", key=True),
    whole("version"),
    sa.Column("stopped", sa.Boolean, nullable=False),
    time("created_at"),
    time("updated_at"),
    time("deleted_at", null=True),
    sa.Column("policy", sa.Text, nullable=False, server_default="{}"),
    time("lease_s", null=True),
    time("expires_at", null=True),
    sa.ForeignKeyConstraint(
        ["tenant", "environment"], ["environments.tenant", "environments.name"]
    ),
    sa.Index("ix_apps_expiry", "expires_at"),
)
"""`policy`: how releases are guarded: {"approvals": n, ...}; set by administrators, not by a
deploy. `lease_s`, `expires_at`: length of its lease and when it ends; null = it has none."""

deployments = sa.Table(
    "deployments",
    metadata,
    text("tenant", key=True),
    text("environment", key=True),
    text("app", key=True),
    sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
    text("action"),
    time("created_at"),
    text("created_by"),
    text("message"),
    text("labels"),
    text("functions"),
    sa.ForeignKeyConstraint(
        ["tenant", "environment", "app"], ["apps.tenant", "apps.environment", "apps.name"]
    ),
)

functions = sa.Table(
    "functions",
    metadata,
    text("id", key=True),
    text("tenant"),
    text("environment"),
    text("app"),
    text("name"),
    whole("revisions"),
    time("created_at"),
    time("removed_at", null=True),
    sa.Column("snapshots", sa.Boolean, nullable=False, server_default=sa.true()),
    sa.Column("document", sa.Text, nullable=False, server_default="{}"),
    sa.Column("generation", sa.BigInteger, nullable=False, server_default="0"),
    sa.ForeignKeyConstraint(
        ["tenant", "environment", "app"], ["apps.tenant", "apps.environment", "apps.name"]
    ),
    sa.UniqueConstraint("tenant", "environment", "app", "name"),
)

revisions = sa.Table(
    "revisions",
    metadata,
    text("function", sa.ForeignKey("functions.id"), key=True),
    text("name", key=True),
    text("digest"),
    whole("ordinal"),
    text("spec"),
    time("created_at"),
    *(
        sa.Column(name, sa.Text, nullable=False, server_default="{}")
        for name in ("lineage", "evaluation")
    ),
    sa.Column("created_by", sa.Text, nullable=False, server_default=""),
    time("served_at", null=True),
    time("pruned_at", null=True),
    sa.Column("has_tags", sa.Boolean, nullable=False, server_default=sa.true()),
    sa.UniqueConstraint("function", "digest"),
    sa.Index("ix_revisions_age", "function", "created_at", "pruned_at", "has_tags", "name"),
)
"""`spec` defines the revision; `lineage` and `evaluation` are metadata, which its digest does not
cover.

`served_at`: when it first received traffic; null = never. `pruned_at`: since when its blobs may be
missing; null = they are present. `has_tags`: bills are grouped by its tags."""

node_snapshots = sa.Table(
    "node_snapshots",
    metadata,
    text("id", key=True),
    text("function"),
    text("state"),
    time("changed_at"),
    text("document"),
)
"""Snapshots of a cluster's nodes (`controller.node_snapshots`)."""

approvals = sa.Table(
    "approvals",
    metadata,
    text("function", key=True),
    text("revision", key=True),
    text("actor", key=True),
    time("at"),
    text("note"),
    sa.ForeignKeyConstraint(["function", "revision"], ["revisions.function", "revisions.name"]),
)

aliases = sa.Table(
    "aliases",
    metadata,
    text("function", key=True),
    text("name", key=True),
    text("revision"),
    text("updated_by"),
    time("updated_at"),
    sa.ForeignKeyConstraint(["function", "revision"], ["revisions.function", "revisions.name"]),
)

traffic = sa.Table(
    "traffic",
    metadata,
    text("function", key=True),
    text("revision", key=True),
    whole("weight"),
    sa.ForeignKeyConstraint(["function", "revision"], ["revisions.function", "revisions.name"]),
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    text("id", key=True),
    sa.Column("hash", sa.Text, nullable=False, unique=True),
    sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.id"), nullable=False, index=True),
    text("environment", null=True),
    text("scope"),
    text("name"),
    text("created_by"),
    time("created_at"),
    time("expires_at", null=True),
    time("revoked_at", null=True),
    text("app", null=True),
    text("function", null=True),
    sa.Column("quotas", sa.Text, nullable=False, server_default="{}"),
    text("replaces", null=True),
    text("customer", null=True),
)

function_quotas = sa.Table(
    "function_quotas",
    metadata,
    *(text(name, key=True) for name in ("tenant", "environment", "app", "function")),
    text("quotas"),
    time("updated_at"),
    sa.ForeignKeyConstraint(
        ["tenant", "environment"], ["environments.tenant", "environments.name"]
    ),
)

customer_quotas = sa.Table(
    "customer_quotas",
    metadata,
    sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.id"), primary_key=True),
    text("customer", key=True),
    text("quotas"),
    time("updated_at"),
)

secrets = sa.Table(
    "secrets",
    metadata,
    text("tenant", key=True),
    text("environment", key=True),
    text("name", key=True),
    text("sealed"),
    text("variables"),
    time("created_at"),
    time("updated_at"),
    sa.ForeignKeyConstraint(
        ["tenant", "environment"], ["environments.tenant", "environments.name"]
    ),
)

images = sa.Table(
    "images",
    metadata,
    text("tenant", sa.ForeignKey("tenants.id"), key=True),
    text("digest", key=True),
    text("spec"),
    time("created_at"),
    sa.Column("size_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("build_cpu_ns", sa.BigInteger, nullable=False, server_default="0"),
)

container_images = sa.Table(
    "container_images",
    metadata,
    text("tenant", sa.ForeignKey("tenants.id"), key=True),
    text("environment", key=True),
    text("app", key=True),
    text("digest", key=True),
    text("reference"),
    time("pushed_at"),
    text("pushed_by"),
)
"""Of which container image in the registry an app's next revisions with the Image `digest` consist;
a revision keeps the reference that it was made with."""

blobs = sa.Table(
    "blobs",
    metadata,
    text("digest", key=True),
    whole("size_bytes"),
    time("created_at"),
    time("deleting_at", null=True),
    sa.Index("ix_blobs_deleting_at", "deleting_at"),
)
"""`deleting_at`: since when no tenant owns it, so that its bytes are to be deleted; null = a tenant
owns it."""

blob_owners = sa.Table(
    "blob_owners",
    metadata,
    text("tenant", sa.ForeignKey("tenants.id"), key=True),
    text("digest", sa.ForeignKey("blobs.digest"), key=True),
    time("created_at"),
    sa.Column("used_at", sa.Double, nullable=False, server_default="0"),
    sa.Index("ix_blob_owners_digest", "digest"),
)
"""`used_at`: when the tenant last uploaded the blob or checked that it exists."""

weights = sa.Table(
    "weights",
    metadata,
    text("tenant", key=True),
    text("environment", key=True),
    text("name", key=True),
    text("manifest"),
    whole("size_bytes"),
    whole("files"),
    text("source"),
    text("app", null=True),
    sa.Column("is_pinned", sa.Boolean, nullable=False),
    time("created_at"),
    time("updated_at"),
    sa.ForeignKeyConstraint(
        ["tenant", "environment"], ["environments.tenant", "environments.name"]
    ),
    sa.Index("ix_weights_manifest", "manifest"),
)

feed = sa.Table(
    "feed",
    metadata,
    text("kind", key=True),
    text("key", key=True),
    sa.Column("seq", sa.BigInteger, nullable=False, unique=True),
    text("value", null=True),
    time("changed_at"),
)

feed_state = sa.Table(
    "feed_state",
    metadata,
    sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
    whole("head"),
    whole("purged"),
    whole("generation"),
)

calls = sa.Table(
    "calls",
    metadata,
    text("tenant", key=True),
    text("id", key=True),
    text("environment"),
    text("app"),
    text("function"),
    text("state"),
    whole("sequence"),
    time("submitted_at"),
    time("expires_at"),
    text("record"),
    text("payload", null=True),
    sa.Column("kept_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("result", sa.Text, nullable=False, server_default=""),
    sa.Index("ix_calls_tenant_submitted_at", "tenant", "submitted_at"),
    sa.Index("ix_calls_expires_at", "expires_at"),
)
"""`record`: a CallRecord without its result; `result`: the result in base64, in a separate column
so that lists do not read it. `payload`: of a dead letter its function's input, as it was in an
activator's journal; null = no dead letter. `kept_bytes`: of the three texts."""

kept_calls = sa.Table(
    "kept_calls",
    metadata,
    text("tenant", key=True),
    sa.Column("bytes", sa.BigInteger, nullable=False),
)
"""The sum of the column `kept_bytes` of `calls` per tenant."""

audit = sa.Table(
    "audit",
    metadata,
    sa.Column(
        "id",
        sa.BigInteger().with_variant(sa.Integer, "sqlite"),
        primary_key=True,
        autoincrement=True,
    ),
    time("at"),
    text("tenant"),
    text("actor"),
    text("action"),
    text("subject"),
    text("before", null=True),
    text("after", null=True),
    text("request"),
    sa.Column("address", sa.Text, nullable=False, server_default=""),
    sa.Index("ix_audit_tenant_id", "tenant", "id"),
)
