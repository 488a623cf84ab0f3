"""CRIU, driven by us: its RPC, one process per dump or restore, and the proof that it works on this
machine.

Nothing here knows of snapshots, functions or leases: a process inside a slot becomes files, files
become a process."""
