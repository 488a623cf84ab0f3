"""The worker: the process that runs user code, from boot through the snapshot point to a serving
instance.

It lives inside the user's environment: standard library, cloudpickle, uvicorn, uvloop, httptools
and wsproto only. Nothing here may import torch, numpy, pydantic or a web framework; it uses them
only where the user's own code already did (`sys.modules`)."""
