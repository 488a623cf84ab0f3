"""Volumes on a node: their working directories, and what enters and leaves these.

`entries` is the format of manifests, which the controller and clients share. Everything that reads
or writes a tenant's files runs in a process of its own (`mover`), never in the node agent."""
