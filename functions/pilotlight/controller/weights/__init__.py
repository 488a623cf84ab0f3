"""Storage of tenants: blobs, named weights and the node's weight cache; storage quotas and garbage
collection.

Charges for storage are in `controller.billing`."""
