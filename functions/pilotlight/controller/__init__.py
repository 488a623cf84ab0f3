"""The control plane: what is deployed, for whom, under which keys, and what it cost.

One process per database (a lock refuses the second by name). Rows are the truth; the feed that
activators follow is written in the same transaction as the rows, so that it can never tell another
story. Nothing here opens user code or pickles.

`store` opens the database and `tables` lays it out; one module per noun holds the reads and writes
(`registry`, `keys`, `tenants`, `vault`, `ledger`, `calls`, `audit`, `blobs`, `images`); `api` turns
HTTP into calls of them."""
