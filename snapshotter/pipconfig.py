"""How pip finds its packages on this machine, carried into a build that runs as another user.

pip reads /etc/pip.conf, the user's own file and PIP_* variables. A tenant's uid can see the first only, so the files of the
agent's user are merged into one that the build gets as PIP_CONFIG_FILE; variables pass through. Both may name an index with
a password in it: whoever may build against a private index can read how.
"""

from __future__ import annotations

import configparser
import io
from collections.abc import Mapping
from pathlib import Path

_PASSED_ON = frozenset({"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SOURCE_DATE_EPOCH"})
_PROXIES = frozenset({"http_proxy", "https_proxy", "no_proxy", "all_proxy"})
_NOT_PASSED_ON = frozenset(
    f"PIP_{name}" for name in ("CONFIG_FILE", "TARGET", "PREFIX", "ROOT", "USER", "PYTHON", "CACHE_DIR", "LOG", "REQUIRE_VIRTUALENV")
)
"""Variables that would send the packages, or traces of the build, somewhere else than into the image."""


def build_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that a build needs: pip's own, proxies, certificates."""
    kept = {k: v for k, v in environ.items() if k in _PASSED_ON or k.lower() in _PROXIES or k.startswith("PIP_")}
    kept = {k: v for k, v in kept.items() if k not in _NOT_PASSED_ON}
    # No cache: one that a tenant's build can write would feed other tenants' builds of the same image.
    return {**kept, "PIP_NO_CACHE_DIR": "1", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}


def user_config(environ: Mapping[str, str]) -> str:
    """The agent's user-level pip configuration as one file's text.

    Later files win, as they do for pip (its documentation, "Configuration").
    """
    merged = configparser.RawConfigParser()
    for file in _user_files(environ):
        try:
            merged.read_string(file.read_text(), source=str(file))
        except (OSError, UnicodeDecodeError, configparser.Error):
            continue  # pip would say so itself where it matters: in the build's log
    text = io.StringIO()
    merged.write(text)
    return text.getvalue()


def _user_files(environ: Mapping[str, str]) -> list[Path]:
    home = Path(environ.get("HOME", "/nonexistent"))
    files = [home / ".pip" / "pip.conf", Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"]
    if chosen := environ.get("PIP_CONFIG_FILE"):
        files.append(Path(chosen))
    return files
