"""The worker process itself: its channel to the shim, its threads and memory, the snapshot point
of a Template, and what changes when it resumes. User code is loaded in `user_code`."""
