"""Commands for operating the platform: start, stop, diagnose and back it up; show nodes,
instances, snapshots, metrics and objectives."""
