"""Declarations as data: what a function, its policies, traffic, quotas, prices and objectives are,
with their bounds and pure rules, shared by the SDK, the controller, the activator and the worker.
No I/O, and nothing that only one of them needs; headers and records that travel are in
`pilotlight.protocol`."""
