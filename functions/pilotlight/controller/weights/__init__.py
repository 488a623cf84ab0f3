"""What tenants keep on the platform's disks: how it is counted, bounded by their plans, and
deleted.

The bytes themselves are read and written in `controller.blobs`; what a tenant pays for them is in
`controller.storage`."""
