"""`platform.yaml`, read once at startup into frozen records; importing this module reads no
environment variables.

Every package declares its own section as a frozen dataclass and calls `load_section`. Invalid
settings raise `SettingsInvalid` with the file, the line, the key, the value and what is allowed.
The test of every option is `tests/options/test_every_option.py`."""

from __future__ import annotations

import enum
import os
import tempfile
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

if typing.TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = typing.TypeVar("T", bound="DataclassInstance")

MAX_SOCKET_PATH = 107
"""Longest Unix socket path, one byte less than `sun_path` (unix(7))."""
_LONGEST_SOCKET_NAME = len("/slots/s-0123456789abcdef/calls/i-0123456789abcdef.sock")
FUNCTIONS_SOCKET = "http.sock"
"""The socket in `Paths.for_functions` by which functions reach the platform."""
_MAX_RECORD_NAME = 40
_HIGHEST_UID = 65533
"""Below the uid of `nobody`."""
_CONTROLLER_UID = 19902
_SECTIONS = (
    "platform",
    "cluster",
    "activator",
    "controller",
    "snapshotter",
    "weight_cache",
    "prices",
    "plans",
    "issuers",
)


class SettingsInvalid(Exception):
    """Raised when platform.yaml is invalid; the message names file, line, key, value and limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformSettings:
    """Section `platform`.

    Attributes:
        home: directory of persistent data; None = $PILOTLIGHT_HOME or $XDG_DATA_HOME/pilotlight.
        run: directory of sockets; None = <home>/run, or a short private one under the temporary
            directory.
        trust: "isolated", or "shared" to let several tenants share one uid without root.
        blobs: store of bundles, manifests and files of weights: a directory visible to all nodes,
            or s3://bucket/prefix; None = <home>/blobs.
        s3_client: the S3 client: "boto3", "obstore", or "auto" for the faster one installed.
        fleet: where instances run: "local", behind this machine's node agent, or "knative", as pods
            of a cluster (section `cluster`).
        controller_url: `https://host:port` of a controller on another machine; None = its socket in
            <run>.
        key_file: an existing file with the platform's key (a mounted Secret); None =
            <home>/platform.key, created at the first start.
        activator_key_file: a separate key of activators (a mounted Secret), for them and the
            controller; None = <home>/activator.key, which the controller derives from the
            platform's.
        activator_uid: uid and gid of activators if the platform runs as root on one machine, below
            `snapshotter.uid_base`; None = they run as root.
        controller_uid: the same for the controller; must differ from `activator_uid`.
        metrics_token_file: file with the bearer token of metrics over TCP (`metrics_listen`); None
            = <home>/metrics.token, created when needed.
        disk_floor_bytes: free disk reserved for the journals; uploads, builds, snapshots, weights
            and logs stop before; None = 1 GiB, or 1/50 of a disk below 50 GiB; 0 = no floor.
        production: whether others depend on this platform: `pilotlight drill` is refused.
        tls_cert: PEM file of our certificate and its chain, for connections between machines;
            reloaded when it changes.
        tls_key: PEM file of its key.
        tls_ca: PEM file of the authorities that issue the certificates of the others.
    """

    home: str | None = None
    run: str | None = None
    trust: str = "isolated"
    blobs: str | None = None
    s3_client: str = "auto"
    fleet: str = "local"
    controller_url: str | None = None
    key_file: str | None = None
    activator_key_file: str | None = None
    activator_uid: int | None = 19901
    controller_uid: int | None = _CONTROLLER_UID
    metrics_token_file: str | None = None
    disk_floor_bytes: int | None = None
    production: bool = False
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None

    def __post_init__(self) -> None:
        self._check_tls()
        if self.disk_floor_bytes is not None and self.disk_floor_bytes < 0:
            raise ValueError(
                f"disk_floor_bytes = {self.disk_floor_bytes}: must be at least 0 (no floor), or "
                f"null for 1 GiB"
            )
        self._check_uids()
        if self.fleet not in ("local", "knative"):
            raise ValueError(f"fleet = {self.fleet!r}: must be 'local' or 'knative'")
        if self.fleet == "knative":
            self._check_cluster()
        if self.s3_client not in ("auto", "boto3", "obstore"):
            raise ValueError(
                f"s3_client = {self.s3_client!r}: must be 'auto', 'boto3' or 'obstore'"
            )
        if self.blobs is not None and "://" in self.blobs and not self.blobs.startswith("s3://"):
            raise ValueError(
                f"blobs = {self.blobs!r}: must be a directory, s3://bucket/prefix, or null for "
                f"<home>/blobs"
            )
        if self.trust not in ("isolated", "shared"):
            raise ValueError(f"trust = {self.trust!r}: must be 'isolated' or 'shared'")

    def _check_cluster(self) -> None:
        """Refuse what only processes on one machine have: in a cluster the chart names the users of
        pods, and every tenant has a uid."""
        for name, default in (
            ("activator_uid", PlatformSettings.__dataclass_fields__["activator_uid"].default),
            ("controller_uid", _CONTROLLER_UID),
            ("trust", "isolated"),
        ):
            if (value := getattr(self, name)) not in (default, None):
                raise ValueError(
                    f"{name} = {value!r}: has no effect with fleet 'knative', where processes run "
                    f"as the users of their pods: remove it"
                )

    def _check_uids(self) -> None:
        for name, uid, who in (
            ("activator_uid", self.activator_uid, "activators run"),
            ("controller_uid", self.controller_uid, "the controller runs"),
        ):
            if uid is not None and not 0 < uid <= _HIGHEST_UID:
                raise ValueError(
                    f"{name} = {uid}: must be 1 to {_HIGHEST_UID}, or null: then {who} as root"
                )
        if self.activator_uid is not None and self.activator_uid == self.controller_uid:
            named, other = ("activator_uid", "controller_uid")[
                :: 1 if self.controller_uid == _CONTROLLER_UID else -1
            ]
            raise ValueError(
                f"{named} = {self.activator_uid}: must differ from {other}, so that these "
                f"processes are isolated from each other"
            )

    def _check_tls(self) -> None:
        files = {"tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_ca": self.tls_ca}
        missing = [name for name, value in files.items() if not value]
        if 0 < len(missing) < len(files):
            named = next(name for name, value in files.items() if value)
            raise ValueError(
                f"{named} = {files[named]!r}: tls_cert, tls_key and tls_ca must be set together; "
                f"{' and '.join(missing)} is missing"
            )
        if self.controller_url is not None and not self.controller_url.startswith("https://"):
            raise ValueError(
                f"controller_url = {self.controller_url!r}: write https://host:port, or null for "
                f"the socket in <run>"
            )
        if self.controller_url is not None and missing:
            raise ValueError(
                f"controller_url = {self.controller_url!r}: needs tls_cert, tls_key and tls_ca"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Locations of files. Directories are created on first use, 0700.

    Attributes:
        activator_uid: uid and gid of activators, which may enter `run`, if the platform runs as
            root; None = our own uid.
        controller_uid: the same for the controller, which may enter `<run>/controller`.
    """

    home: Path
    run: Path
    activator_uid: int | None = None
    controller_uid: int | None = None

    @classmethod
    def of(cls, settings: PlatformSettings, environ: Mapping[str, str]) -> Paths:
        """Resolve `settings` against the environment (XDG base directories)."""
        data = Path(
            environ.get("XDG_DATA_HOME") or Path(environ.get("HOME", "/root")) / ".local/share"
        )
        home = (
            Path(settings.home or environ.get("PILOTLIGHT_HOME") or data / "pilotlight")
            .expanduser()
            .resolve()
        )
        run = Path(settings.run).resolve() if settings.run else home / "run"
        if len(str(run)) + _LONGEST_SOCKET_NAME > MAX_SOCKET_PATH:
            name = home.as_posix().encode().hex()[-24:]
            run = (
                Path(environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
                / f"pilotlight-{os.getuid()}-{name[-12:]}"
            )
        is_apart = os.geteuid() == 0 and settings.fleet == "local"
        uids = (settings.activator_uid, settings.controller_uid) if is_apart else (None, None)
        return cls(home=home, run=run, activator_uid=uids[0], controller_uid=uids[1])

    def make(self) -> Paths:
        """Create both directories, private to this user.

        Activators with their own uid may enter `run`, a controller with its own uid
        `<run>/controller`; neither may list or create files there."""
        for directory in (self.home, self.run):
            directory.mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o700)
        _grant_group_traversal(self.run, self.activator_uid)
        if self.controller_uid is not None:
            self.for_controller.mkdir(exist_ok=True)
            _grant_group_traversal(self.for_controller, self.controller_uid)
        self.for_functions.mkdir(exist_ok=True)
        self.for_functions.chmod(0o755)  # visible in slots; `run` protects it from other users
        return self

    def socket(self, process: str) -> Path:
        """`<run>/<process>.sock`."""
        return self.run / f"{process}.sock"

    @property
    def for_controller(self) -> Path:
        """`<run>/controller`: sockets of other processes for a controller with its own uid."""
        return self.run / "controller"

    @property
    def for_functions(self) -> Path:
        """`<run>/functions`: the part of `run` visible in every slot; it contains only
        `socket_for_functions`."""
        return self.run / "functions"

    @property
    def socket_for_functions(self) -> Path:
        """Socket by which functions reach the platform: the activator's HTTP API."""
        return self.for_functions / FUNCTIONS_SOCKET

    def socket_for_controller(self, process: str) -> Path:
        """The socket of `process` for the controller: `<run>/controller/<process>.sock` if it has
        its own uid, else `socket`."""
        return (
            self.socket(process)
            if self.controller_uid is None
            else self.for_controller / f"{process}.sock"
        )


def _grant_group_traversal(directory: Path, gid: int | None) -> None:
    if gid is None:
        directory.chmod(0o700)
        return
    os.chown(directory, -1, gid)
    directory.chmod(0o710)


def read_secret(key: str, value: str | None, file: str | None) -> str | None:
    """A secret setting: `value`, or the content of `file` (setting `<key>_file`). Raises
    ValueError."""
    if file is None:
        return value
    if value is not None:
        raise ValueError(f"{key}_file = {file!r}: {key} is set, too: set only one of them")
    try:
        return Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(
            f"{key}_file = {file!r}: cannot be read ({e}): is the secret mounted?"
        ) from e


def require_defaults(section: str, settings: Any, keys: Iterable[str], *, why: str) -> None:
    """Raise SettingsInvalid for the first of `keys` that was changed, because it would have no
    effect; `why` continues "section.key = value: "."""
    defaults = type(settings)()
    for key in keys:
        value = getattr(settings, key)
        if value is not None and value != getattr(defaults, key):
            raise SettingsInvalid(f"{section}.{key} = {value!r}: {why}: remove it")


def load_section(kind: type[T], section: str, file: Path | None) -> T:
    """Read one section of `file` (None or missing file: defaults) into the record `kind`. Raises
    SettingsInvalid."""
    node = _find_section(section, file)
    return kind() if node is None or file is None else _parse_record(kind, section, node, file)


def load_named_records(
    kind: type[T], section: str, file: Path | None, *, base: Mapping[str, T]
) -> dict[str, T]:
    """Read a section of named records, each a `kind` with a field `name`, in addition to those of
    `base`, which the file may change.

    Missing fields are taken from the record of the same name in `base`, or from the defaults.
    Raises SettingsInvalid."""
    found = dict(base)
    node = _find_section(section, file)
    if node is None or file is None:
        return found
    if not isinstance(node, yaml.MappingNode):
        raise SettingsInvalid(
            f"{_location(file, node)}: section {section!r} must contain names with keys and values"
        )
    for key, value in node.value:
        name = str(key.value)
        if not name.isidentifier() or len(name) > _MAX_RECORD_NAME:
            raise SettingsInvalid(
                f"{_location(file, key)}: {section}.{name}: a name has letters, digits and _, "
                f"at most {_MAX_RECORD_NAME}"
            )
        known = base.get(name)
        given = {f.name: getattr(known, f.name) for f in fields(kind)} if known is not None else {}
        found[name] = _parse_record(
            kind, f"{section}.{name}", value, file, given={**given, "name": name}
        )
    return found


def load_section_key(section: str, key: str, file: Path | None) -> Any:
    """One key of a section owned by another process; None if missing. Raises SettingsInvalid."""
    node = _find_section(section, file)
    if not isinstance(node, yaml.MappingNode):
        return None
    found = next((value for name, value in node.value if name.value == key), None)
    return None if found is None else yaml.SafeLoader("").construct_object(found, deep=True)


def parse_item(kind: type[T], where: str, value: Any) -> T:
    """Parse one item of a list into the record `kind`, whose fields all have defaults. Raises
    ValueError that begins with `where` and names the key, the value and what is allowed."""
    hints = typing.get_type_hints(kind)
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} = {value!r}: expected keys and values")
    for key, one in value.items():
        if key not in hints:
            raise ValueError(f"{where}.{key}: unknown key; known: {', '.join(sorted(hints))}")
        if not _matches_type(hints[key], one):
            raise ValueError(f"{where}.{key} = {one!r}: expected {_describe_type(hints[key])}")
    try:
        return kind(**value)
    except ValueError as e:
        raise ValueError(f"{where}.{e}") from e


def _find_section(section: str, file: Path | None) -> yaml.Node | None:
    """The section's node; None if it is missing or empty."""
    if file is None or not file.exists():
        return None
    node = _parse_yaml(file)
    if node is None:
        return None
    sections = {key.value: (key, value) for key, value in node.value}
    for name, (key, _) in sections.items():
        if name not in _SECTIONS:
            raise SettingsInvalid(
                f"{_location(file, key)}: unknown section {name!r}; sections are: "
                f"{', '.join(_SECTIONS)}"
            )
    if section not in sections or sections[section][1].tag == "tag:yaml.org,2002:null":
        return None
    found: yaml.Node = sections[section][1]
    return found


def _parse_yaml(file: Path) -> yaml.MappingNode | None:
    try:
        node = yaml.compose(file.read_text(), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise SettingsInvalid(f"{file}: cannot be read: {e}") from e
    if node is not None and not isinstance(node, yaml.MappingNode):
        raise SettingsInvalid(
            f"{_location(file, node)}: expected sections, got {node.tag.rpartition(':')[2]}"
        )
    return node


def _parse_record(
    kind: type[T],
    section: str,
    node: yaml.Node,
    file: Path,
    *,
    given: Mapping[str, Any] | None = None,
) -> T:
    if not isinstance(node, yaml.MappingNode):
        raise SettingsInvalid(
            f"{_location(file, node)}: section {section!r} must contain keys and values"
        )
    hints = typing.get_type_hints(kind)
    known = {f.name for f in fields(kind)} - ({"name"} & (given or {}).keys())
    values: dict[str, Any] = dict(given or {})
    lines: dict[str, str] = {}
    for key, value_node in node.value:
        if key.value not in known:
            raise SettingsInvalid(
                f"{_location(file, key)}: unknown key {section}.{key.value}; known: "
                f"{', '.join(sorted(known))}"
            )
        value = _to_enum(
            hints[key.value], yaml.SafeLoader("").construct_object(value_node, deep=True)
        )
        if not _matches_type(hints[key.value], value):
            raise SettingsInvalid(
                f"{_location(file, key)}: {section}.{key.value} = {value!r}: expected "
                f"{_describe_type(hints[key.value])}"
            )
        values[key.value] = float(value) if hints[key.value] is float else value
        lines[key.value] = _location(file, key)
    try:
        return kind(**values)
    except ValueError as e:
        where = next((at for key, at in lines.items() if str(e).startswith(key)), str(file))
        raise SettingsInvalid(f"{where}: {section}.{e}") from e


def _to_enum(hint: Any, value: Any) -> Any:
    """Convert an enum member's value to the member; return other values unchanged."""
    if (
        isinstance(hint, type)
        and issubclass(hint, enum.Enum)
        and value in [member.value for member in hint]
    ):
        return hint(value)
    return value


def _matches_type(hint: Any, value: Any) -> bool:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_matches_type(arg, value) for arg in typing.get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    base = typing.get_origin(hint) or hint
    return isinstance(value, base)


def _describe_type(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in hint)
    names = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        type(None): "null",
    }
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_describe_type(arg) for arg in typing.get_args(hint))
    return names.get(
        hint, "keys and values" if isinstance(typing.get_origin(hint) or hint, type) else str(hint)
    )


def _location(file: Path, node: yaml.Node) -> str:
    return f"{file}:{node.start_mark.line + 1}"
