"""What the node knows of imports: the order of each function, environment snapshots that did not
fit a function, and images for which IMPORT is off. Only the last is kept across restarts, in a
file."""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from pilotlight.core.durability import write_durably
from snapshotter.environments.import_order import ImportOrder
from snapshotter.types import LaunchSpec, RevisionKey

_log = logging.getLogger(__name__)
K = TypeVar("K")
V = TypeVar("V")
_MOST = 5_000
_MOST_OFF = 1_000
_UNFIT_MS = 400.0
"""What a start loses by a list that does not fit."""
OWN_IMAGE = "the platform's own environment"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOff:
    """IMPORT is off for an image and a uid. `at`: wall clock."""

    image: str
    uid: int | None
    reason: str
    at: float


class ImportRecords:
    """The records. Owner: the event loop; each is bounded, the oldest go first."""

    def __init__(self, file: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._file = file
        self._clock = clock
        self._orders: OrderedDict[str, ImportOrder] = OrderedDict()
        self._likeness: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._longest: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._unfit: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._verified: OrderedDict[tuple[RevisionKey, str], None] = OrderedDict()
        self._off = _read(file)

    def __repr__(self) -> str:
        return f"<ImportRecords {len(self._orders)} functions, {len(self._off)} images off>"

    # -- import orders

    def learn(self, launch: LaunchSpec, order: ImportOrder) -> None:
        """Record the import order of a function's newest boot."""
        function = function_of(launch.revision)
        earlier = self._orders.get(function, ImportOrder())
        _store(self._orders, function, order.with_parts_of(earlier))
        _store(self._likeness, function, _likeness(launch))

    def order(self, revision: RevisionKey) -> ImportOrder | None:
        """The order of the function's last boot; None if none is known."""
        return self._orders.get(function_of(revision))

    def saving_ms(self, launch: LaunchSpec, modules: Sequence[str]) -> float:
        """What a list saves the known functions that are most like this one: those of its name and
        weights (as the same app under another name), otherwise all."""
        likeness = _likeness(launch)
        alike = [name for name, known in self._likeness.items() if known == likeness]
        saved = [self._orders[name].ms_of(modules) for name in alike or self._orders]
        return sum(-_UNFIT_MS if ms is None else ms for ms in saved)

    def set_longest(self, revision: RevisionKey, modules: Sequence[str]) -> None:
        """The function works with no longer list than this one."""
        _store(self._longest, function_of(revision), tuple(modules))

    def longest(self, revision: RevisionKey, order: ImportOrder) -> list[str]:
        """The longest list of an order that the function may work with."""
        known = self._longest.get(function_of(revision))
        return list(known) if known is not None and order.begins_with(known) else order.names

    # -- snapshots that do not fit

    def exclude(self, revision: RevisionKey, snapshot_id: str) -> None:
        """The function's code does not work in this environment snapshot: do not try it again."""
        _store(self._unfit, (function_of(revision), snapshot_id), None)

    def is_excluded(self, revision: RevisionKey, snapshot_id: str) -> bool:
        """Whether it was excluded for this function."""
        return (function_of(revision), snapshot_id) in self._unfit

    def set_verified(self, revision: RevisionKey, snapshot_id: str) -> None:
        """A boot from nothing has answered as this revision did in that snapshot."""
        _store(self._verified, (revision, snapshot_id), None)

    def is_verified(self, revision: RevisionKey, snapshot_id: str) -> bool:
        """Whether that was compared already."""
        return (revision, snapshot_id) in self._verified

    # -- images

    def switch_off(self, launch: LaunchSpec, reason: str) -> None:
        """Use no environment snapshot of this image again. Blocking. Raises OSError."""
        off = ImageOff(
            image=launch.image or OWN_IMAGE, uid=launch.uid, reason=reason, at=self._clock()
        )
        self._off = [o for o in self._off if (o.image, o.uid) != (off.image, off.uid)]
        self._off = [*self._off, off][-_MOST_OFF:]
        write_durably(self._file, json.dumps([asdict(one) for one in self._off]).encode())

    def why_off(self, launch: LaunchSpec) -> str:
        """Why IMPORT is off for the image of this launch; "" if it is on."""
        image = launch.image or OWN_IMAGE
        return next((o.reason for o in self._off if (o.image, o.uid) == (image, launch.uid)), "")

    @property
    def off(self) -> tuple[ImageOff, ...]:
        """The images for which IMPORT is off."""
        return tuple(self._off)


def function_of(revision: RevisionKey) -> str:
    """The function id in a revision's key."""
    return revision.partition("@")[0]


def _likeness(launch: LaunchSpec) -> tuple[str, ...]:
    """Functions that have this in common are most likely the same one, in apps of other names."""
    names = (str(launch.entry.get(part, "")) for part in ("module", "qualname"))
    return (*names, *sorted(weights.manifest for weights in launch.weights))


def _store(records: OrderedDict[K, V], key: K, value: V) -> None:
    records[key] = value
    records.move_to_end(key)
    if len(records) > _MOST:
        records.popitem(last=False)


def _read(file: Path) -> list[ImageOff]:
    try:
        return [ImageOff(**entry) for entry in json.loads(file.read_bytes())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as e:
        _log.warning("imports.records_ignored file=%s error=%s", file, e)
        return []
