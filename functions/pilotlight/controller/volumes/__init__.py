"""Volumes: their manifests, the chunks of their files, and commits.

What is on a node is `snapshotter.volumes`; the manifests here are the truth."""
