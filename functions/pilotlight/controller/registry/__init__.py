"""Registry of deployed functions: app references, revisions, launch specs, images, secrets, and the
publication of functions to the change feed. Traffic of revisions is in `release`."""
