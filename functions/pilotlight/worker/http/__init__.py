"""The HTTP side of an instance: server, calls, results and web applications. What a call computes
is `user_code`."""
