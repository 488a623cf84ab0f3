"""Knative Serving and the parts of Kubernetes under it, restated for tests: controllers,
autoscaler, activator, scheduler and a kubelet that runs containers as processes, against the tests'
API server through the official client.

`cluster.FakeKnative` is all of it; `python -m tests.fakes.knative` runs it as a cluster for
development. Needs root (mount and PID namespaces). For functions of autoscaler class
`pilotlight.dev` the scale is left to whoever keeps that class."""
