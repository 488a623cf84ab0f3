"""Images: environments built step by step in a sandbox, their root file systems, and the code
bundles that are unpacked beside them.

The SDK decides what an image consists of; this package starts no instances."""
