"""Calls that are submitted, and answered later: they wait in the journal, and their results and
streams are kept.

Schedules and webhooks that come due are begun here, too.
"""
