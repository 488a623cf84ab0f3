"""What stands between a worker and a snapshot: open connections, threads, kernel objects, and how
the process is brought to rest."""
