"""What can be called, and by whom: routes, keys, traffic splits, cutovers.

All of this state comes from the controller through `config_feed`.
"""
