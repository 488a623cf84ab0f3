"""Resolution of requests to a caller, function and revision: routes, keys, traffic splits,
cutovers.

All of this state comes from the controller through `config_feed`.
"""
