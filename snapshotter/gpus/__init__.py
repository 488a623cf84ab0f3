"""GPUs of the node as a resource: which there are, and which slot has which.

What a process does with a GPU, and its GPU state in a snapshot, is in `snapshotter.cuda`."""
