"""How a slot is confined: namespaces, mounts, the root directory, seccomp, and the archive of its
working directory. Imports the standard library and `snapshotter.shim` only."""
