"""The Python SDK: declarations of apps and functions, handles, and calls.

The modules import only the standard library. httpx, cloudpickle and pydantic are loaded on first
use, because this package is imported in user processes and in workers before their snapshot."""
