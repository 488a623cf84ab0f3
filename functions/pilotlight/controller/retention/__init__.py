"""Retention of what has no end of its own: history of calls and releases, revisions without
traffic, images without revisions. The periodic task of the controller applies it.

Limits of plans, and the ends of single things, are with what they limit.
"""
