"""The node agent: every process that runs user code on this machine.

It boots, forks and stops them, owns their logs and watches their ends. It knows
revisions and opaque labels, never tenants' data. Other packages enter through its doors:
`types`, `errors` and `client`. (containerd calls a thing for image layers a
"snapshotter" too; here a snapshot is a process image.)
"""
