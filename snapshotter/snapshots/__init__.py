"""Snapshots on disk: their identity, content, location and validation.

The parts that handle files are here; CRIU, which writes and reads the images, is driven from
`snapshotter.criu`."""
