"""Instances that are pods of a cluster: `fleet.KnativeFleet` and its parts. What speaks to
Kubernetes itself is `pilotlight.cluster`."""
