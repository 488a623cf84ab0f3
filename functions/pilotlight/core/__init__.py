"""Shared foundation of all packages: settings, RPC, transport, TLS, object stores, keys, logs and
metrics. It has no concept of functions, weights or snapshots, and imports no other package of the
platform."""
