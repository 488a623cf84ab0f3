"""What users write with: declarations, handles, calls.

Everything here imports the standard library only until it is used: httpx, cloudpickle and pydantic
are loaded by the call that needs them, because this package is imported in user processes and in
workers before their snapshot point."""
