"""Alembic's entry point: migrates on the connection, and in the transaction, of `Store.migrate`.

Versions restate columns, bounds and expressions: what a version did must not change with the
tables of today."""

from alembic import context

from pilotlight.controller.database.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=False,
)
context.run_migrations()
