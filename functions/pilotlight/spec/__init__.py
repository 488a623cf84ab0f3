"""Data types for functions, policies, traffic, quotas, prices and objectives, with their bounds and
pure rules, shared by the SDK, the controller, the activator and the worker. No I/O. Headers and
records on the wire are in `pilotlight.protocol`."""
