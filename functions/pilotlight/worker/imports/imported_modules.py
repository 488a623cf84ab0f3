"""Modules that were imported before user code, in groups: one per import, with all that it loaded.

An *opened* module is one that user code executes itself, since executing it ahead would change what
earlier ones do; the first of its imports were made ahead, and are the last groups.

They are hidden from user code until it imports them (`recorder.ImportRecorder`). Modules of the
standard library stay visible: user code may import them in any order."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from pilotlight.worker.imports.process_state import ModuleMembers

_OURS = ("pilotlight", "snapshotter", "weight_cache")


class ImportedModules:
    """The groups, in the order of their imports. Owner: the worker's main thread.

    Attributes:
        last: name and duration (ms) of the import that became visible last.
        last_members: the members of its modules.
        opened: the module that user code executes itself; "" if there is none.
    """

    def __init__(self) -> None:
        self.opened = ""
        self._opened_at = 0
        self._roots: list[tuple[str, float]] = []
        self._groups: list[dict[str, Any]] = []
        self._members: list[ModuleMembers] = []
        self._attributes: list[list[tuple[Any, str, Any]]] = []
        self._group_of: dict[str, int] = {}
        self._names: set[str] = set()
        self._shown = 0
        self.last = ("", 0.0)
        self.last_members = ModuleMembers({})

    def __repr__(self) -> str:
        return f"<ImportedModules {self._shown} of {len(self._roots)} visible>"

    def add(self, root: str, ms: float, before: frozenset[str]) -> None:
        """Record one import. `before`: names of the modules that were loaded before it."""
        loaded = {name: sys.modules[name] for name in sys.modules.keys() - before}
        self._names |= {name.partition(".")[0] for name in loaded}
        group = {name: module for name, module in loaded.items() if _is_hidden(name)}
        self._group_of |= dict.fromkeys(group, len(self._groups))
        self._roots.append((root, ms))
        self._groups.append(group)

    def open(self, name: str) -> None:
        """What is added from now on are imports of the module `name`, which is not executed."""
        self.opened, self._opened_at = name, len(self._roots)

    def opens(self, name: str) -> bool:
        """Whether user code may execute this module now, though imports are hidden."""
        return bool(self.opened) and name == self.opened and self._shown == self._opened_at

    @property
    def is_opened(self) -> bool:
        """Whether the next import is one of the opened module."""
        return bool(self.opened) and self._shown >= self._opened_at

    @property
    def roots(self) -> list[tuple[str, float]]:
        """Name and duration (ms) of each import, in order."""
        return list(self._roots)

    @property
    def shown(self) -> int:
        """Number of imports that are visible."""
        return self._shown

    @property
    def next_root(self) -> str:
        """The import that becomes visible next; "" if all are."""
        return self._roots[self._shown][0] if self._shown < len(self._roots) else ""

    def holds(self, name: str) -> bool:
        """Whether a module is loaded and hidden."""
        return self._group_of.get(name, -1) >= self._shown

    def clash_with(self, code: str) -> str:
        """A file of the function that another process would have imported in place of one of these
        modules, because the function's directory comes first; "" if there is none."""
        try:
            entries = sorted(os.listdir(code))
        except OSError:
            return ""
        return next((entry for entry in entries if entry.partition(".")[0] in self._names), "")

    def copy_members(self) -> None:
        """Remember what their modules have as members, before user code can change any."""
        self._members = [ModuleMembers(group) for group in self._groups]

    def hide(self) -> None:
        """Hide all of them: from `sys.modules`, and from the packages of earlier groups that name
        them as a member."""
        if not self._members:
            self.copy_members()
        for index, group in enumerate(self._groups):
            removed = []
            for name, module in group.items():
                sys.modules.pop(name, None)
                parent_name, _, member = name.rpartition(".")
                if parent_name and self._group_of.get(parent_name, index) != index:
                    parent = self._groups[self._group_of[parent_name]][parent_name]
                    members = getattr(parent, "__dict__", {})
                    if members.get(member) is module:
                        with contextlib.suppress(AttributeError):
                            delattr(parent, member)
                            removed.append((parent, member, module))
            self._attributes.append(removed)

    def reveal(self) -> Any:
        """Make the next group visible; returns the module of its import. That module itself is
        entered into `sys.modules` by importlib."""
        root, ms = self._roots[self._shown]
        group, attributes = self._groups[self._shown], self._attributes[self._shown]
        self._shown += 1
        self.last, self.last_members = (root, ms), self._members[self._shown - 1]
        for name, module in group.items():
            if name != root:
                sys.modules[name] = module
        for parent, member, module in attributes:
            setattr(parent, member, module)
        return group[root]


def _is_hidden(name: str) -> bool:
    top = name.partition(".")[0]
    return top not in sys.stdlib_module_names and top not in _OURS and not top.startswith("__m")
