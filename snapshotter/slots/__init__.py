"""What an instance lives in: slots and the pool of spare ones, what is launched in them, their
logs, their weights, and the agent's half of the conversation with a shim.

The other half is in `shim`.
"""
