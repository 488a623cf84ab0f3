"""The controller's work in a cluster: reconcile functions as Knative Services, and drain the
journals of removed activators.

`loop.run` is the task; `reconciler` does the work while this controller is the leader.
"""
