"""Routes about what deployments consist of: blobs, images, weights, snapshots, and freeing their
storage."""
