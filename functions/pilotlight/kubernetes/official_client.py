"""The parts of the official client that this package uses, imported without its generated models.

`import kubernetes` imports 1,700 modules: two clients with a class for each kind, which takes a
second of CPU time and 70 MB. Here `__init__` of the large packages runs only when something is
looked up in them that is not there yet, so other code in the process may use all of the client.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

_LARGE = (
    "kubernetes",
    "kubernetes.aio",
    "kubernetes.aio.client",
    "kubernetes.aio.client.models",
)
_loading = threading.RLock()


def _postpone(name: str) -> None:
    """Enter the package `name` as imported, and run its `__init__` at the first lookup that
    fails."""
    spec = importlib.util.find_spec(name)
    if spec is None or (loader := spec.loader) is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    module = importlib.util.module_from_spec(spec)

    is_loaded = False

    def look_up(attribute: str) -> Any:
        nonlocal is_loaded
        with _loading:  # other threads wait until `__init__` has run
            if not is_loaded:
                is_loaded = True  # before: `__init__` looks up its own parts
                try:
                    loader.exec_module(module)
                except BaseException:
                    is_loaded = False
                    raise
        if attribute in vars(module):
            return vars(module)[attribute]
        raise AttributeError(f"module {name!r} has no attribute {attribute!r}")

    vars(module)["__getattr__"] = look_up
    sys.modules[name] = module
    above, _, own = name.rpartition(".")
    if above:
        setattr(sys.modules[above], own, module)


def _client() -> ModuleType:
    if "kubernetes" not in sys.modules:
        for name in _LARGE:
            _postpone(name)
    client = sys.modules.get("kubernetes.aio.client") or importlib.import_module(
        "kubernetes.aio.client"
    )
    # its parts import one another from the package: what they look up has to be there
    importlib.import_module("kubernetes.aio.client.rest")
    for part, name in (("configuration", "Configuration"), ("api_client", "ApiClient")):
        vars(client)[name] = getattr(importlib.import_module(f"{client.__name__}.{part}"), name)
    return client


_found = _client()
ApiClient: Any = _found.ApiClient
Configuration: Any = _found.Configuration
_kube_config = importlib.import_module("kubernetes.aio.config.kube_config")
KubeConfigLoader: Any = _kube_config.KubeConfigLoader
KubeConfigMerger: Any = _kube_config.KubeConfigMerger
ConfigException: type[Exception] = _kube_config.ConfigException
