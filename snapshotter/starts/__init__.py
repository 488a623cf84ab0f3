"""Starts of instances: FORK from a Template, RESTORE from a snapshot, or COLD, the choice among
them, suspension and teardown.

Slots come from `slots`, snapshots from `snapshots`.
"""
