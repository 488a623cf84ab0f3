"""The CRIU driver: its RPC, one process per dump or restore, and a self test on this machine.

It is independent of snapshots, functions and leases: it dumps a process inside a slot to files and
restores a process from files."""
