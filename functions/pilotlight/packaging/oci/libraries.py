"""Which shared libraries ELF files need, all the way down, and where they are on this machine."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pilotlight.packaging.oci.elf import MAGIC, Elf, read_elf

ALSO = ("libgcc_s.so.1", "libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2")
"""What glibc opens by name when it is needed (thread cancellation, names of hosts) and no header
mentions; where it is there."""
_LIBC = "libc.so.6"
_DEFAULT = ("/lib/{triplet}", "/usr/lib/{triplet}", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
_TRIPLETS = {62: "x86_64-linux-gnu", 183: "aarch64-linux-gnu"}
"""By ELF machine."""


class LibrariesMissing(Exception):
    """Raised when what is to run cannot: no loader, no C library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryClosure:
    """Libraries by the name that they are asked for, the loader at its own path, and what was asked
    for and is not on this machine.

    `folder`: where the loader looks without being told: the C library's own directory.
    """

    loader: str
    loader_file: Path
    folder: str
    files: dict[str, Path]
    missing: dict[str, str]


@dataclass(slots=True)
class _Search:
    """One walk. `inside`: trees that go into the image as they are; what is found there needs no
    second copy."""

    folders: tuple[Path, ...]
    inside: tuple[Path, ...]
    machine: int
    files: dict[str, Path] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    seen: set[Path] = field(default_factory=set)

    def follow(self, path: Path, elf: Elf, inherited: tuple[str, ...]) -> None:
        """`inherited`: RPATHs of whoever loads it."""
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
        """The first library of that name for this machine."""
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
    """What `executable` and every ELF file below `trees` need, but for those whose names begin as
    one of `without` does.

    Raises LibrariesMissing, OSError.
    """
    program = read_elf(executable)
    if program is None or program.interpreter is None:
        raise LibrariesMissing(f"{executable} is no dynamic executable of this machine")
    loader = Path(program.interpreter)
    if not loader.is_file():
        raise LibrariesMissing(f"{executable} asks for the loader {loader}, which is not here")
    roots = tuple(tree.resolve() for tree in trees)
    search = _Search(folders=_folders(program.machine), inside=roots, machine=program.machine)
    search.follow(executable, program, ())
    if _LIBC not in search.files:
        raise LibrariesMissing(f"{executable} needs no {_LIBC}: only glibc systems can be exported")
    if lost := [name for name, by in search.missing.items() if by == executable.name]:
        raise LibrariesMissing(f"{executable} needs {', '.join(lost)}, not on this machine")
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
    # loaded by their package before who needs them
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
    """Directories that ldconfig(8) is told of."""
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
