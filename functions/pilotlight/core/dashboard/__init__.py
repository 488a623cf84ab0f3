"""The parts of the controller's dashboard that the activator and the command line use: its origin,
and the cookie part that they read. Pages and sessions are in the controller."""
