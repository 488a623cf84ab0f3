"""The HTTP side of an instance: its server, its calls and their deadlines. What a call computes,
its results and web applications are `user_code`."""
