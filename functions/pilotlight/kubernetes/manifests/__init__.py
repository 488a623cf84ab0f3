"""Builds the manifests of a tenant and its functions, as JSON values. Pure: records in, objects
out, in a stable order.

`render` prints them and the reconciler applies them, with the same functions.
"""
