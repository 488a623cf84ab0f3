"""Snapshots on the nodes of a cluster: the register of them, and the orders that nodes get. What
nodes report is received in `api/internal`."""
