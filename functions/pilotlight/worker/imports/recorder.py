"""Records which packages of the image user code imports, in which order and how long each takes,
until something stands in the way of importing them before user code in another process.

An *import* here is one module of the image that is executed while no other one is: what it imports
itself belongs to it: the first of these are its *parts*. The recorder is a finder
(importlib.abc.MetaPathFinder) that is first in `sys.meta_path` until the snapshot point; nothing
else is replaced.

In a process that was restored from an environment snapshot the packages are loaded already.
`ImportedModules` has them hidden then, and each one becomes visible when user code imports it: in
the same order, in an unchanged process. Anything else ends the process (`ImportOrderDiffers`): the
function is booted from nothing instead."""

from __future__ import annotations

import contextlib
import opcode
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any, cast

from pilotlight.worker.imports.imported_modules import ImportedModules
from pilotlight.worker.imports.process_state import ModuleMembers, ProcessState, loaded_modules

MAX_RECORDED = 400
"""Imports and parts that one worker reports: its message must fit into a datagram."""
_MAX_PARTS = 60
_OPENED_MS = 50.0
"""Parts are reported of imports that take longer, up to the last part that takes a tenth of it."""
_MAX_NAME = 128
Parts = tuple[tuple[str, float], ...]
"""Names and durations (ms) of modules that an import executes itself, in order."""
_IMPORTS = frozenset(opcode.opmap[name] for name in ("IMPORT_NAME", "IMPORT_FROM"))


class ImportOrderDiffers(Exception):
    """Raised when user code does not import the packages of an environment snapshot as they were
    imported there. The message begins with the number of those that it did."""


class ImportRecorder:
    """The recorder of one worker, for its main thread. Owner: `worker.run`.

    Attributes:
        recorded: names of the imports, in order, with their duration in ms, and their parts.
        ended: why nothing was recorded from then on; "" as long as nothing stands in the way.
    """

    def __init__(
        self,
        *,
        site: Sequence[str],
        code: str,
        ahead: ImportedModules | None = None,
        on_difference: Callable[[ImportOrderDiffers], None] | None = None,
    ) -> None:
        """`site`: directories of the image's packages; `code`: of the function. `ahead`: modules
        that were imported before user code. `on_difference` ends the process."""
        self._site = tuple(os.path.join(directory, "") for directory in site)
        self._code = os.path.join(code, "")
        self._ahead = ahead
        self._on_difference = on_difference
        self._thread = threading.get_ident()
        self._is_loading = self._is_asking = self._is_in_part = False
        self._current: _Import | None = None
        self._state: ProcessState | None = None
        self._members = ModuleMembers({})
        self._last: tuple[FrameType, int] | None = None
        self.recorded: list[tuple[str, float, Parts]] = []
        self.ended = ""

    def __repr__(self) -> str:
        return f"<ImportRecorder {len(self.recorded)} imports{', ended' if self.ended else ''}>"

    def start(self) -> None:
        """Begin, before user code runs."""
        sys.meta_path.insert(0, self)
        if self._ahead is not None:
            if clash := self._ahead.clash_with(self._code):
                self._differ(f"the function's own {clash} has the name of a module of the image")
            self._ahead.hide()
        self._members = ModuleMembers(loaded_modules())
        self._state = ProcessState()

    def stop(self) -> None:
        """End, at the snapshot point. Nothing that was imported ahead may be left hidden: a later
        import would execute it a second time."""
        if self._ahead is not None and self._ahead.next_root:
            self._differ(f"it did not import {self._ahead.next_root}")
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._clear_state()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record what the worker's own code imports in this context."""
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False

    def report(self) -> dict[str, Any]:
        """What the snapshot point says: `modules` (name, ms, parts as name and ms) and `ended`."""
        modules = [
            [name, round(ms, 3), [[part, round(took, 3)] for part, took in parts]]
            for name, ms, parts in self.recorded
        ]
        return {"modules": modules, "ended": self.ended}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Find a module by the other finders, and time it if it is an import of user code."""
        if self._is_asking:
            return None
        if self._ahead is not None and self._ahead.holds(name):
            return self._revealing(name)
        if self.ended and (self._ahead is None or not self._ahead.next_root):
            return None
        is_part = self._current is not None and not self._is_in_part
        if (self._is_loading and not is_part) or threading.get_ident() != self._thread:
            return None
        self._is_asking = True
        try:
            spec = _found(name, path, target, but=self)
        finally:
            self._is_asking = False
        if spec is not None and self._is_of_the_image(spec) and hasattr(spec.loader, "exec_module"):
            kind = _PartLoader if is_part else _TimedLoader
            spec.loader = cast(Any, kind(spec.loader, self))
        return spec

    def _is_of_the_image(self, spec: ModuleSpec) -> bool:
        return (spec.origin or "").startswith(self._site)

    # -- an import that is executed here

    def begin(self, name: str) -> _Import | None:
        """An import begins; None if it belongs to another one, or is not recorded."""
        if self._is_loading or threading.get_ident() != self._thread:
            return None
        if self._ahead is not None and self._ahead.next_root:
            if not self._ahead.opens(name):
                self._differ(f"it imports {name} before {self._ahead.next_root}")
            if change := self._change():
                self._differ(f"before it imports {name}, it changes {change}")
        self._record_change(name)
        self._is_loading = True
        self._current = _Import(
            name=name, before=frozenset(sys.modules), threads=thread_count(), fds=held()
        )
        return self._current

    def begin_part(self, name: str) -> bool:
        """The current import executes another module; False if that belongs to another part."""
        if self._current is None or self._is_in_part or threading.get_ident() != self._thread:
            return False
        if self._ahead is not None and self._ahead.next_root:
            self._differ(f"{self._current.name} imports {name} before {self._ahead.next_root}")
        self._is_in_part = True
        return True

    def end_part(self, name: str, ms: float, *, is_loaded: bool) -> None:
        """That is over."""
        self._is_in_part = False
        if self._current is not None:
            self._current.add_part(name, ms, is_loaded=is_loaded)

    def end(self, started: _Import, *, is_loaded: bool) -> None:
        """It is over. `is_loaded`: it raised nothing."""
        self._is_loading, self._current = False, None
        if self._ahead is not None and self._ahead.next_root:
            self._differ(f"{started.name} does not import {self._ahead.next_root}")
        if self.ended:
            return
        if why := self._obstacle(started, is_loaded=is_loaded):
            self.ended = why
            self._clear_state()
            return
        ms = started.took_ms()
        self.recorded.append((started.name, ms, started.worth_opening(ms)))
        self._members.refresh()
        self._state = ProcessState()
        if sum(1 + len(parts) for _, _, parts in self.recorded) >= MAX_RECORDED - _MAX_PARTS:
            self.ended = f"more than {MAX_RECORDED} imports"

    def _obstacle(self, started: _Import, *, is_loaded: bool) -> str:
        """Why this import cannot be made before user code; "" if it can."""
        name = started.name
        if not is_loaded:
            return f"importing {name} failed"
        if not _is_importable(name):
            return f"the name of {name[:_MAX_NAME]} is not one that can be imported"
        for module in sys.modules.keys() - started.before:
            if str(getattr(sys.modules[module], "__file__", None) or "").startswith(self._code):
                return f"{name} imports the function's own {module}"
        return left_out(name, started.threads, started.fds)

    def _record_change(self, name: str) -> None:
        if not self.ended and (change := self._change()):
            self.ended = f"before it imports {name}, the function changes {change}"
            self._clear_state()

    def _change(self) -> str:
        """What user code has changed since the last import. Nothing, if both belong to one `import`
        statement of user code, as those of a lazy package do."""
        assert self._state is not None
        statement = self._statement()
        if statement is not None and statement == self._last:
            return ""
        self._last = statement
        return ProcessState().change_since(self._state) or self._members.change()

    def _statement(self) -> tuple[FrameType, int] | None:
        """The `import` that user code executes now: its frame and instruction."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(self._code):
            frame = frame.f_back
        if frame is None or frame.f_code.co_code[frame.f_lasti] not in _IMPORTS:
            return None
        return frame, frame.f_lasti

    def _clear_state(self) -> None:
        self._state, self._members, self._last = None, ModuleMembers({}), None

    # -- an import that was executed before

    def _revealing(self, name: str) -> ModuleSpec:
        assert self._ahead is not None
        is_part = self._is_executing_opened()
        if (
            name != self._ahead.next_root
            or self._is_loading != is_part
            or self._ahead.is_opened != is_part
        ):
            self._differ(f"it imports {name} before {self._ahead.next_root}")
        if threading.get_ident() != self._thread:
            self._differ(f"a thread of it imports {name}")
        if not is_part and (change := self._change()):
            self._differ(f"before it imports {name}, it changes {change}")
        loader: Any = _RevealingLoader(self, self._ahead)
        return ModuleSpec(name, loader, origin="environment snapshot")

    def revealed(self, name: str, ms: float) -> None:
        """A module that was imported ahead is visible now. No code ran for it, so the state is
        still that of before."""
        assert self._ahead is not None
        if self._current is not None:
            self._current.add_part_made_ahead(name, ms)
        else:
            self.recorded.append((name, ms, ()))
        self._members.update(self._ahead.last_members)

    def _is_executing_opened(self) -> bool:
        assert self._ahead is not None
        current = self._current
        return current is not None and current.name == self._ahead.opened and not self._is_in_part

    def _differ(self, why: str) -> None:
        shown = self._ahead.shown if self._ahead is not None else 0
        error = ImportOrderDiffers(f"{shown}: {why}")
        if self._on_difference is not None:
            self._on_difference(error)
        raise error


class _Import:
    """One import in progress."""

    def __init__(
        self, *, name: str, before: frozenset[str], threads: int, fds: dict[int, str]
    ) -> None:
        self.name, self.before, self.threads, self.fds = name, before, threads, fds
        self._began = time.monotonic()
        self._parts: list[tuple[str, float]] = []
        self._has_all_parts = True
        self._ahead, self._ahead_ms = 0, 0.0

    def took_ms(self) -> float:
        """Since it began, and what took its time before."""
        return (time.monotonic() - self._began) * 1000 + self._ahead_ms

    def add_part_made_ahead(self, name: str, ms: float) -> None:
        """A module that was imported in its place. All of these are reported: without them the
        order of this boot would not begin with the list of its environment snapshot."""
        self._parts.append((name, ms))
        self._ahead, self._ahead_ms = self._ahead + 1, self._ahead_ms + ms

    def add_part(self, name: str, ms: float, *, is_loaded: bool) -> None:
        """A module that it imports. A submodule of its own ends them: it cannot be imported without
        it."""
        if name.startswith(f"{self.name}.") or not is_loaded or not _is_importable(name):
            self._has_all_parts = False
        if self._has_all_parts and len(self._parts) < _MAX_PARTS:
            self._parts.append((name, ms))

    def worth_opening(self, ms: float) -> Parts:
        """Its parts, as far as they are worth being reported."""
        if ms < _OPENED_MS:
            return tuple(self._parts[: self._ahead])
        large = [n for n, (_, took) in enumerate(self._parts) if took >= ms / 10]
        return tuple(self._parts[: max([self._ahead, *(n + 1 for n in large)])])


class _TimedLoader:
    """Loads one module as its own loader does, and tells the recorder when. The module never sees
    it: its attributes name its own loader again before it is executed."""

    def __init__(self, loader: Any, recorder: ImportRecorder) -> None:
        self._loader, self._recorder = loader, recorder
        self._import: _Import | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module (importlib.abc.Loader); an extension module runs code here."""
        self._begin(spec.name)
        create = getattr(self._loader, "create_module", None)
        try:
            module: ModuleType | None = create(spec) if create is not None else None
        except BaseException:
            self._end(is_loaded=False)
            raise
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module (importlib.abc.Loader)."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        is_loaded = False
        try:
            self._loader.exec_module(module)
            is_loaded = True
        finally:
            self._end(is_loaded=is_loaded)

    def _begin(self, name: str) -> None:
        self._import = self._recorder.begin(name)

    def _end(self, *, is_loaded: bool) -> None:
        if self._import is not None:
            self._recorder.end(self._import, is_loaded=is_loaded)
            self._import = None


class _PartLoader(_TimedLoader):
    """Loads one module that an import of user code imports, and tells the recorder when."""

    _name, _began, _is_part = "", 0.0, False

    def _begin(self, name: str) -> None:
        self._name, self._began = name, time.monotonic()
        self._is_part = self._recorder.begin_part(name)

    def _end(self, *, is_loaded: bool) -> None:
        if self._is_part:
            self._is_part = False
            ms = (time.monotonic() - self._began) * 1000
            self._recorder.end_part(self._name, ms, is_loaded=is_loaded)


class _RevealingLoader:
    """Loads a module that was executed before by making it visible, with all that it imported."""

    def __init__(self, recorder: ImportRecorder, ahead: ImportedModules) -> None:
        self._recorder, self._ahead = recorder, ahead
        self._spec: Any = None

    def create_module(self, spec: ModuleSpec) -> Any:
        """The module itself (importlib.abc.Loader)."""
        module = self._ahead.reveal()
        self._spec = getattr(module, "__spec__", None)
        return module

    def exec_module(self, module: Any) -> None:
        """Give it its own specification back; it is executed already."""
        try:
            module.__spec__ = self._spec
            if self._spec is not None:
                module.__loader__ = self._spec.loader
        except AttributeError:
            pass  # importlib tolerates an object without these attributes as well
        self._recorder.revealed(*self._ahead.last)


def _is_importable(name: str) -> bool:
    return len(name) <= _MAX_NAME and all(part.isidentifier() for part in name.split("."))


def left_out(name: str, threads: int, fds: dict[int, str]) -> str:
    """Why a module cannot be in an environment snapshot: what its import left behind, compared with
    the threads and descriptors before it; "" if nothing."""
    if thread_count() > threads:
        return f"importing {name} starts a thread"
    for descriptor, link in held().items():
        if fds.get(descriptor) != link:
            kind = "a socket" if link.startswith("socket:") else f"the device {link}"
            return f"importing {name} opens {kind}"
    return ""


def thread_count() -> int:
    """Threads of this process, native ones included."""
    return len(os.listdir("/proc/self/task"))


def held() -> dict[int, str]:
    """Open sockets and devices by descriptor, except those that every process has."""
    held = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # the directory's own descriptor
            continue
        if link.startswith(("socket:", "/dev/")) and link not in _HARMLESS:
            held[int(entry)] = link
    return held


_HARMLESS = frozenset({"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"})


def _found(
    name: str, path: Sequence[str] | None, target: Any, *, but: ImportRecorder
) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        if finder is not but and find is not None:
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                return spec
    return None
