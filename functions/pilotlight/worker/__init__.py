"""The worker: the process that runs user code, from boot through the snapshot point to a serving
instance.

It runs in the user's environment and imports only the standard library, cloudpickle, uvicorn,
uvloop, httptools and wsproto. It must not import torch, numpy, pydantic or a web framework, and
uses them only if the user's code has imported them (`sys.modules`)."""
