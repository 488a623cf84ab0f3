"""Sessions of boto3 that share one reading of botocore's data files.

A session of its own parses the description of S3 anew: 0.1 s of CPU for each client that is made.
Credentials, region and configuration are each session's own; they are looked up when it is made.
"""

from __future__ import annotations

import threading
from typing import Any

_lock = threading.Lock()
_loader: Any = None


def shared_session(**given: str) -> Any:
    """`boto3.session.Session(**given)`, from any thread. Raises BotoCoreError, as that does."""
    global _loader
    import boto3
    import botocore.session

    core = botocore.session.get_session()
    with _lock:
        if _loader is None:
            _loader = core.get_component("data_loader")
        core.register_component("data_loader", _loader)
        made = boto3.session.Session(botocore_session=core, **given)
        # each session adds boto3's own directory
        _loader.search_paths[:] = dict.fromkeys(_loader.search_paths)
    return made
