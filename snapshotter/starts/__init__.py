"""How an instance is started: FORK from a Template, RESTORE from a snapshot, COLD, and which of
them when; how it is suspended and torn down.

Slots come from `slots`, snapshots from `snapshots`.
"""
