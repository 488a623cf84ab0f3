"""Assignment of calls to instances: throttlers, instance pools, queues, reservations, and instances
that are suspended or yielded to other activators.

`autoscaler` decides how many instances there should be.
"""
