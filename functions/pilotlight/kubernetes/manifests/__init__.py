"""Manifests: what a tenant and its functions are in a cluster, as JSON values. Pure: records in,
objects out, the same order every time.

`render` prints them, the reconciler applies them; both call the same functions.
"""
