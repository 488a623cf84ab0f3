"""Entrypoint of a pod: gets code and weights from the node agent, runs one worker, and exits with
it.

It imports only the standard library and the platform's entry modules, because it is the first step
of a cold start."""
