"""The node agent: its components, its RPC for activators and the controller, and the node's
capabilities.

Starts are in `starts`, slots in `slots`; this package refers to them by name only.
"""
