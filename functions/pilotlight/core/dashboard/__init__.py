"""What the activator and the command line must know of the controller's dashboard: its origin, and
the part of its cookie that they read. Pages and sessions live in the controller."""
