"""Preparation of a worker for a snapshot: hooks and warm-up, detection of open connections and
kernel objects that block it, and quiescing the process."""
