"""Resolution of the shared libraries that ELF files need, transitively, on this machine."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pilotlight.packaging.oci.elf import MAGIC, Elf, read_elf

ALSO = ("libgcc_s.so.1", "libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2")
"""Libraries that glibc opens by name on demand (thread cancellation, host names), which no ELF
header lists. Included if present."""
_LIBC = "libc.so.6"
_DEFAULT = ("/lib/{triplet}", "/usr/lib/{triplet}", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
_TRIPLETS = {62: "x86_64-linux-gnu", 183: "aarch64-linux-gnu"}
"""By ELF machine."""


class LibrariesMissing(Exception):
    """Raised when an executable cannot run, for lack of its loader or a library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryClosure:
    """All libraries that an executable needs, and its loader.

    Attributes:
        loader: path at which executables expect the loader.
        folder: default directory of the loader, which is that of the C library.
        files: libraries, requested name → path.
        missing: libraries that were not found, requested name → file that needs it."""

    loader: str
    loader_file: Path
    folder: str
    files: dict[str, Path]
    missing: dict[str, str]


@dataclass(slots=True)
class _Search:
    """The state of one resolution. `inside`: trees that are copied to the image anyway, so that
    libraries in them need no second copy."""

    folders: tuple[Path, ...]
    inside: tuple[Path, ...]
    machine: int
    files: dict[str, Path] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    seen: set[Path] = field(default_factory=set)

    def follow(self, path: Path, elf: Elf, inherited: tuple[str, ...]) -> None:
        """Resolve the libraries that `path` needs. `inherited`: RPATHs of the files that load
        it."""
        real = path.resolve()
        if real in self.seen:
            return
        self.seen.add(real)
        search = tuple(
            part.replace("${ORIGIN}", "$ORIGIN").replace("$ORIGIN", str(real.parent))
            for part in elf.search
        )
        for name in elf.needed:
            found = self.find(name, (*search, *inherited))
            if found is None:
                self.missing.setdefault(name, path.name)
                continue
            where, what = found
            if not any(where.resolve().is_relative_to(tree) for tree in self.inside):
                self.files.setdefault(name, where)
            self.follow(where, what, (*search, *inherited))

    def find(self, name: str, search: Iterable[str]) -> tuple[Path, Elf] | None:
        """Return the first library of this name for this machine."""
        for folder in (*map(Path, search), *self.folders):
            path = folder / name
            if (
                path.is_file()
                and (elf := read_elf(path)) is not None
                and elf.machine == self.machine
            ):
                return path, elf
        return None


def find_library_closure(
    executable: Path, *, trees: Iterable[Path] = (), without: Collection[str] = ()
) -> LibraryClosure:
    """Resolve the libraries of `executable` and all ELF files below `trees`, except files whose
    names begin with one of `without`.

    Raises LibrariesMissing, OSError."""
    program = read_elf(executable)
    if program is None or program.interpreter is None:
        raise LibrariesMissing(f"{executable} is not a dynamic executable for this machine")
    loader = Path(program.interpreter)
    if not loader.is_file():
        raise LibrariesMissing(f"{executable} needs the loader {loader}, which does not exist")
    roots = tuple(tree.resolve() for tree in trees)
    search = _Search(folders=_folders(program.machine), inside=roots, machine=program.machine)
    search.follow(executable, program, ())
    if _LIBC not in search.files:
        raise LibrariesMissing(
            f"{executable} does not use {_LIBC}: only glibc systems can be exported"
        )
    if lost := [name for name, by in search.missing.items() if by == executable.name]:
        raise LibrariesMissing(
            f"{executable} needs {', '.join(lost)}, which were not found on this machine"
        )
    for root in roots:
        for path in sorted(root.rglob("*")):
            if (
                not path.name.startswith(tuple(without))
                and _is_elf(path)
                and (elf := read_elf(path)) is not None
                and elf.machine == program.machine
            ):
                search.follow(path, elf, ())
    for name in ALSO:
        if (found := search.find(name, ())) is not None:
            search.files.setdefault(name, found[0])
            search.follow(*found, ())
    files = {name: path for name, path in sorted(search.files.items()) if name != loader.name}
    # a package loads its own libraries before those that need them
    by_tree = {path.name for root in roots for path in root.rglob("*.so*")}
    return LibraryClosure(
        loader=str(loader),
        loader_file=loader,
        folder=str(search.files[_LIBC].parent),
        files=files,
        missing={name: by for name, by in sorted(search.missing.items()) if name not in by_tree},
    )


def _folders(machine: int) -> tuple[Path, ...]:
    triplet = _TRIPLETS.get(machine, "")
    defaults = [
        Path(text.format(triplet=triplet)) for text in _DEFAULT if triplet or "{" not in text
    ]
    return tuple(
        path for path in [*defaults, *_configured(Path("/etc/ld.so.conf"))] if path.is_dir()
    )


def _configured(file: Path) -> list[Path]:
    """Return the directories in the configuration of ldconfig(8)."""
    found: list[Path] = []
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return found
    for line in (line.partition("#")[0].strip() for line in lines):
        if line.startswith("include "):
            pattern = line.removeprefix("include ").strip()
            for more in sorted(Path("/").glob((file.parent / pattern).as_posix().lstrip("/"))):
                found += _configured(more)
        elif line.startswith("/"):
            found.append(Path(line))
    return found


def _is_elf(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    if ".so" not in path.name and not path.stat().st_mode & 0o100:
        return False
    with path.open("rb") as file:
        return file.read(4) == MAGIC
