"""PID 1 of a slot: what runs as root inside its namespaces, from the standard library alone.

It imports nothing but itself and `snapshotter.shim.messages`: its files are all that a slot's root
process consists of."""
