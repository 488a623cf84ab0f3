"""Environment snapshots: which ones there may be, what is known of a function's imports, and how a
start uses one (IMPORT). They are made in `checkpointing`."""
