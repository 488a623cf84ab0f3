"""The data plane: route → authenticate → admit → reserve → forward → meter.

The top layer; nobody imports it. `gateway.py` holds a request's whole life.
"""
