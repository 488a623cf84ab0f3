"""State shared by the activators of one platform: membership and instance allowances.

Used only with `activator.activators` above one. A single activator has no shared state, and warm
calls do not use it. `peers` and `identity` concern the other activators."""
