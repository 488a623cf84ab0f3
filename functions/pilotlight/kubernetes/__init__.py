"""Access to Kubernetes and Knative for the controller, the activators and the command line. A door
of this package.

This package starts nothing by itself: the owner of a `Cluster` makes all calls.
"""
