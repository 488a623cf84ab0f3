"""Who may call what: the caller and the function of a request, and the quotas, limits and
priorities of that caller there.

`routing` has the tables that this reads.
"""
