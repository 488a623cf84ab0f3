"""The call that runs in this process, for user code and for the calls that it makes: its context
and its spans.

The worker sets it for each call. The modules import only the standard library."""
