"""Alembic's entry: migrates on the connection (and in the transaction) that `Store.migrate` hands
over."""

from alembic import context

from pilotlight.controller.database.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=False,
)
context.run_migrations()
