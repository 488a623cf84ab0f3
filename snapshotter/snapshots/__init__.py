"""Snapshots on disk: what they are of, what they are made of, where they lie, and whether one may
be used.

The parts that touch files live here; CRIU, which writes and reads the images, is driven from
`snapshotter.criu`."""
