"""The Open Inference Protocol over gRPC: a process of its own, which translates each request to one
over HTTP to its activator, and the answer back."""
