"""The HTTP side of an instance: its server, its calls and their deadlines. User functions, their
results and web applications are in `user_code`."""
