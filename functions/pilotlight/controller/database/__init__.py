"""The database: connection, tables, migrations, the change feed with the notifier of its followers,
the audit trail, retention. No module here imports another folder of the controller."""
