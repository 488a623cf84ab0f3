"""Transfer of one file from the origin or a peer to the disk: range reads, their scheduling, and
resumable partial files. Which models the store keeps is decided in `weight_cache.store`."""
