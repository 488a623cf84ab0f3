"""The platform's foundation, on which every other package stands: settings, RPC, transport, TLS,
object stores, keys, logs and metrics. Nothing here knows functions, weights or snapshots, and
nothing here imports another package of the platform."""
