"""Collections: dicts and queues, their values, and requests that wait for a value of a queue."""
