"""The worker process itself: its start, its channel to the shim, its threads, output and memory,
and what changes when it resumes. User code is loaded in `user_code`."""
