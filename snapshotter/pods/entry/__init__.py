"""Entering pods from outside: the processes that do so, what they do inside, and the agent's side
of both. The agent itself never enters one."""
