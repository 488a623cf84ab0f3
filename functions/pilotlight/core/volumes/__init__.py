"""What volumes consist of, shared by the node agent, the controller and clients."""
