"""Slots, which contain instances: the pool of spare slots, launches, logs, weights, and the agent's
side of the protocol with a shim.

The other side is in `shim`.
"""
