"""The worker process: its channel to the shim, its threads and memory, the snapshot point of a
Template, and the changes on resume. User code is loaded in `user_code`."""
