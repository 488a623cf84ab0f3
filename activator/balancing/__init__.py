"""Which instance takes a call: throttlers, instance pools, queues, reservations, and instances that
are suspended or yielded.

How many there should be is decided in `autoscaler`.
"""
