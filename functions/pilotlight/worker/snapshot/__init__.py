"""What stands between a worker and a snapshot: hooks and the warm-up before it, open connections
and kernel objects, and how the process is brought to rest."""
