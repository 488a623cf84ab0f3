"""Checks whether a cluster has everything that the platform needs, with the required settings.
Facts are fetched once; every check is pure."""
