"""boto3 sessions that share botocore's parsed data files.

A separate session parses the description of S3 again: 0.1 s of CPU for each client. Credentials,
region and configuration are per session, resolved when it is created.
"""

from __future__ import annotations

import threading
from typing import Any

_lock = threading.Lock()
_loader: Any = None


def shared_session(**given: str) -> Any:
    """Create `boto3.session.Session(**given)`; thread-safe. Raises BotoCoreError."""
    global _loader
    import boto3
    import botocore.session

    core = botocore.session.get_session()
    with _lock:
        if _loader is None:
            _loader = core.get_component("data_loader")
        core.register_component("data_loader", _loader)
        made = boto3.session.Session(botocore_session=core, **given)
        # each session adds boto3's data directory again
        _loader.search_paths[:] = dict.fromkeys(_loader.search_paths)
    return made
