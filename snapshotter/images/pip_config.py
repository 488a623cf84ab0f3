"""This machine's pip configuration, passed to builds that run as another user, without the
operator's credentials.

pip reads global files such as /etc/pip.conf, the user's own file and PIP_* variables. All files are
merged into one that the build gets as PIP_CONFIG_FILE, and the global ones are hidden from it;
variables pass through. Tenant code can see all of that, so users, passwords and queries of URLs are
removed, as are client certificates and keyrings: builds cannot use an index or a proxy that
requires them."""

from __future__ import annotations

import configparser
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_PASSED_ON = frozenset(
    {"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SOURCE_DATE_EPOCH"}
)
GLOBAL_FILES = (Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf"))
"""In the order in which pip reads them (its documentation, "Configuration")."""
_PROXIES = frozenset({"http_proxy", "https_proxy", "no_proxy", "all_proxy"})
_CREDENTIALS = frozenset({"CLIENT_CERT", "KEYRING_PROVIDER"})
_NOT_PASSED_ON = frozenset(
    f"PIP_{name}"
    for name in (
        *(
            "CONFIG_FILE",
            "TARGET",
            "PREFIX",
            "ROOT",
            "USER",
            "PYTHON",
            "CACHE_DIR",
            "LOG",
            "REQUIRE_VIRTUALENV",
        ),
        *_CREDENTIALS,
    )
)
"""Variables that would write packages or traces of the build outside the image; and credentials."""
_USER = re.compile(r"((?:^|(?<=\s))|[A-Za-z][A-Za-z0-9+.-]*://)[^/\s]*@", re.MULTILINE)
"""User and password of a URL, or of a proxy address without a scheme."""
_PATH = re.compile(r"(?:^|(?<=[\s,=]))(file://)?(/[^\s,:;?#]+)", re.MULTILINE)
_QUERY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^\s?#]*)\?[^\s#]*")


def build_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that a build needs, without credentials: pip's own, proxies,
    certificate authorities."""
    kept = {name: without_credentials(value) for name, value in _passed_on(environ).items()}
    # No cache: a cache that a tenant's build can write would feed other tenants' builds of the same
    # image.
    fixed = {
        "PIP_NO_CACHE_DIR": "1",
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
    }
    return {**kept, **fixed, "PIP_KEYRING_PROVIDER": "disabled"}


def build_config(
    environ: Mapping[str, str], *, global_files: tuple[Path, ...] = GLOBAL_FILES
) -> str:
    """The pip configuration of the machine and the agent's user as the text of one file, without
    credentials."""
    merged = _merged(environ, global_files)
    for section in merged.sections():
        for key, value in merged.items(section):
            if key.replace("-", "_").upper() in _CREDENTIALS:
                merged.remove_option(section, key)
            else:
                merged.set(section, key, without_credentials(value))
    return _text(merged)


def has_credentials(
    environ: Mapping[str, str], *, global_files: tuple[Path, ...] = GLOBAL_FILES
) -> bool:
    """Whether credentials were removed that pip on this machine would use."""
    passed = _passed_on(environ)
    is_named = any(f"PIP_{name}" in environ for name in _CREDENTIALS)
    is_in_url = any(without_credentials(value) != value for value in passed.values())
    return (
        is_named
        or is_in_url
        or _text(_merged(environ, global_files)) != build_config(environ, global_files=global_files)
    )


def without_credentials(text: str) -> str:
    """`text` without the user, password and query of every URL in it."""
    return _QUERY.sub(r"\1", _USER.sub(r"\1", text))


def index_settings(environ: Mapping[str, str]) -> list[str]:
    """Texts that name pip's package sources and proxies on this machine: variables, and the text of
    its configuration."""
    variables = build_variables(environ).items()
    texts = [
        value
        for name, value in variables
        if name.startswith("PIP_") or name.lower() in _PROXIES - {"no_proxy"}
    ]
    return [*texts, build_config(environ)]


def named_paths(texts: Iterable[str]) -> list[Path]:
    """Existing files and directories that such texts name (constraints, wheels, certificates), the
    longest path first.

    For a directory that is an index (`file://…`), its parent: its links lead to siblings."""
    found = {
        _with_neighbours(Path(match[2])) if match[1] else Path(match[2])
        for text in texts
        for match in _PATH.finditer(text)
    }
    return sorted(
        (path for path in found if path.exists()), key=lambda path: len(str(path)), reverse=True
    )


def _with_neighbours(index: Path) -> Path:
    return index.parent if index.is_dir() and len(index.parts) > 2 else index


def _passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    wanted = {
        k: v
        for k, v in environ.items()
        if k in _PASSED_ON or k.lower() in _PROXIES or k.startswith("PIP_")
    }
    return {k: v for k, v in wanted.items() if k not in _NOT_PASSED_ON}


def _merged(
    environ: Mapping[str, str], global_files: tuple[Path, ...]
) -> configparser.RawConfigParser:
    """The merged files; later files win, as in pip."""
    merged = configparser.RawConfigParser()
    for file in (*global_files, *_user_files(environ)):
        try:
            merged.read_string(file.read_text(), source=str(file))
        except (OSError, UnicodeDecodeError, configparser.Error):
            continue  # pip reports it in the build's log if it matters
    return merged


def _text(config: configparser.RawConfigParser) -> str:
    text = io.StringIO()
    config.write(text)
    return text.getvalue()


def _user_files(environ: Mapping[str, str]) -> Iterator[Path]:
    home = Path(environ.get("HOME", "/nonexistent"))
    yield home / ".pip" / "pip.conf"
    yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    if chosen := environ.get("PIP_CONFIG_FILE"):
        yield Path(chosen)
