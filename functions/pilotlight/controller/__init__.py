"""The control plane: deployments, tenants, API keys, usage and billing.

One process per database (a lock rejects a second one). The tables are the source of truth; the feed
that activators follow is written in the same transaction as the rows, so they always agree. The
controller neither opens user code nor unpickles anything.

`database` holds the tables and the feed, `server` the process and its HTTP frame; one package per
subject holds the reads and writes (`registry`, `identity`, `billing`, …); `api` maps HTTP to
them."""
