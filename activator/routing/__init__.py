"""Which function, revision and instance group a request is for, and who sent it: routes, keys,
traffic splits, cutovers.

All of it comes from the controller by `config_feed`.
"""
