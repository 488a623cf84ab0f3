"""Global state of the process that code can change before it imports a package, and by which the
package may then behave differently: environment, path, import hooks, threads, signal handlers,
random generators, CUDA, patched functions."""

from __future__ import annotations

import operator
import os
import random
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any

_OF_THE_PLATFORM = ("pilotlight", "snapshotter", "weight_cache", "__main__", "__mp_main__")
"""Top-level packages that are not compared: the worker itself."""
_OF_HOOKS = {signal.SIGALRM, signal.SIGINT}
"""Signals whose handlers the worker exchanges while a hook runs: for its deadline, and asyncio."""
_SIGNALS = tuple(sorted(map(int, signal.valid_signals() - _OF_HOOKS)))


class ModuleMembers:
    """Members of modules, and of the classes of the standard library, as they were. Each is a
    shallow copy, so that no object can be replaced by another one at the same address.

    With torch and transformers loaded, a comparison takes some 10 ms."""

    def __init__(self, modules: Mapping[str, Any]) -> None:
        """`modules`: name → module."""
        self._known: dict[str, tuple[Any, dict[str, Any]]] = {}
        self._classes: dict[tuple[str, type], dict[str, Any]] = {}
        for name, module in modules.items():
            self._add(name, module)

    def __repr__(self) -> str:
        return f"<ModuleMembers of {len(self._known)} modules>"

    def update(self, other: ModuleMembers) -> None:
        """Add those of other modules."""
        self._known |= other._known
        self._classes |= other._classes

    def refresh(self) -> None:
        """Take over what has changed, and all modules that were loaded meanwhile."""
        for name, module in loaded_modules().items():
            known = self._known.get(name)
            if known is None or known[0] is not module or not _is_same(vars(module), known[1]):
                self._add(name, module)
        for (name, kind), then in list(self._classes.items()):
            if not _is_same(vars(kind), then):
                self._classes[name, kind] = dict(vars(kind))

    def change(self) -> str:
        """A function or class that was replaced, as `module.name`; "" if there is none.

        Added members do not count: lazy packages add them when they are read. Methods of classes
        are compared for the standard library only."""
        for name, (module, then) in self._known.items():
            if sys.modules.get(name) is not module:
                return f"the module {name}"
            if not _is_same(now := vars(module), then) and (member := _replaced(now, then)):
                return f"{name}.{member}"
        for (name, kind), then in self._classes.items():
            if not _is_same(members := vars(kind), then) and (member := _replaced(members, then)):
                return f"{name}.{kind.__name__}.{member}"
        return ""

    def _add(self, name: str, module: Any) -> None:
        members = dict(vars(module))
        self._known[name] = (module, members)
        if name.partition(".")[0] in sys.stdlib_module_names:
            for kind in members.values():
                if isinstance(kind, type) and kind.__module__ == name:
                    self._classes[name, kind] = dict(vars(kind))


class ProcessState:
    """The state at one moment, of everything but modules."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._directory = _directory()
        self._path = list(sys.path)
        self._finders = list(sys.meta_path)
        self._hooks = list(sys.path_hooks)
        self._threads = len(os.listdir("/proc/self/task"))
        self._signals = [signal.getsignal(number) for number in _SIGNALS]
        self._random = dict(_random_states())
        self._cuda = _is_cuda_initialized()

    def __repr__(self) -> str:
        return f"<ProcessState {len(self._environment)} variables, {self._threads} threads>"

    def change_since(self, before: ProcessState) -> str:
        """What differs from an earlier state, as a phrase; "" if nothing does."""
        for name, is_same in (
            ("sys.path", self._path == before._path),
            ("import hooks", self._has_same_hooks(before)),
            ("the working directory", self._directory == before._directory),
            ("threads", self._threads == before._threads),
            ("signal handlers", self._signals == before._signals),
            ("the state of a random generator", self._has_same_random(before)),
            ("CUDA", self._cuda == before._cuda),
        ):
            if not is_same:
                return name
        if different := self._environment.items() ^ before._environment.items():
            return f"the environment variable {min(name for name, _ in different)}"
        return ""

    def _has_same_hooks(self, before: ProcessState) -> bool:
        pairs = ((self._finders, before._finders), (self._hooks, before._hooks))
        return all(len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in pairs)

    def _has_same_random(self, before: ProcessState) -> bool:
        """Of a package that was loaded meanwhile the state is not known before."""
        return all(self._random.get(name) == state for name, state in before._random.items())


def loaded_modules() -> dict[str, Any]:
    """The modules that are compared: name → module."""
    return {
        name: module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in _OF_THE_PLATFORM and hasattr(module, "__dict__")
    }


def _is_same(now: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now.values(), then.values()))


def _replaced(now: Mapping[str, Any], then: Mapping[str, Any]) -> str:
    return next(
        (name for name, value in then.items() if callable(value) and now.get(name) is not value),
        "",
    )


def _random_states() -> Iterator[tuple[str, Any]]:
    yield "random", hash(random.getstate())
    if numpy_random := sys.modules.get("numpy.random"):
        kind, keys, *rest = numpy_random.get_state()
        yield "numpy", (kind, hash(keys.tobytes()), *rest)
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "initial_seed"):
        yield "torch", torch.initial_seed()


def _is_cuda_initialized() -> bool:
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return bool(hasattr(cuda, "is_initialized") and cuda.is_initialized())


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""
