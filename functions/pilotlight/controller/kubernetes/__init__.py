"""What the controller does in a cluster: functions become Knative Services, and departed
activators' journals are shipped.

`loop.run` is the task; `reconciler` does the work while this controller is the leader.
"""
