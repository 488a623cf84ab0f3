"""The node agent: every process that runs user code on this machine.

It boots, forks and stops these processes, owns their logs and watches for their exit. It knows
revisions and opaque labels, never tenants' data. Other packages import only `types`, `errors` and
`client`. (containerd calls its image layer component a "snapshotter" too; here a snapshot is a
process image.)
"""
