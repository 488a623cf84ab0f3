"""One call: what it is, how it is run, tried again and replaced by a fallback, and how its
arguments are checked.

It knows no HTTP; callers are answered in `gateway`.
"""
