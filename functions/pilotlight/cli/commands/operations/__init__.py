"""Commands for operating the platform: start and stop it, examine it, back it up, and look at
nodes, instances, snapshots, metrics and objectives."""
