"""The node agent: what it is put together from, its RPC for activators and the controller, and what
a node can do.

How an instance comes to be is in `starts`, what it lives in in `slots`; neither is known here but
by name."""
