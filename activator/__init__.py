"""The data plane: route → authenticate → admit → reserve → forward → meter.

The top layer: no other package imports it. `gateway/pipeline.py` handles a request from start to
end.
"""
