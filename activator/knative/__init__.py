"""Instances that are pods of a cluster: `fleet.KnativeFleet` and its parts. Communication with
Kubernetes is in `pilotlight.kubernetes`."""
