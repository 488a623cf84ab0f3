"""Submitted (asynchronous) calls: they wait in the journal, and their results and streams are
stored.

Scheduled calls that become due are run here, too.
"""
