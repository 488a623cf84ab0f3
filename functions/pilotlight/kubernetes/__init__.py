"""The cluster: what of Kubernetes and Knative the controller, the activators and the command line
know. A door of this package.

Nothing here runs by itself: who holds a `Cluster` decides what is done with it.
"""
