"""Alembic's entry point: migrates on the connection, and in the transaction, of `Store.migrate`."""

from alembic import context

from pilotlight.controller.database.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=False,
)
context.run_migrations()
