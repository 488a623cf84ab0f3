"""An import-linter contract: a package is entered from outside only through its doors.

A door is a module right below a root package whose name is on the list. The contract looks at every
direct import between two different root packages; what a package does inside is its own affair. The
package itself (`import pilotlight`) is no door: it is the SDK's, for users."""

from __future__ import annotations

from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class DoorsContract(Contract):
    """Option `doors`: the names of the modules that may be imported from other root packages."""

    # a descriptor: parsed into a set of str
    doors: Any = fields.SetField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Find imports that pass through a wall."""
        roots = frozenset(self.session_options["root_packages"])
        doors = frozenset(self.doors)
        walls = sorted(
            (importer, imported)
            for importer in graph.modules
            for imported in graph.find_modules_directly_imported_by(importer)
            if is_through_wall(importer, imported, roots=roots, doors=doors)
        )
        return ContractCheck(kept=not walls, metadata={"walls": walls})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Name each import."""
        for importer, imported in check.metadata["walls"]:
            output.print_error(
                f"- {importer} imports {imported}, which is not a door of its package"
            )


def is_through_wall(
    importer: str, imported: str, *, roots: frozenset[str], doors: frozenset[str]
) -> bool:
    """True if `importer` lives in another root package than `imported`, and `imported` is not
    behind a door."""
    package, _, inside = imported.partition(".")
    if package not in roots or importer.partition(".")[0] == package:
        return False
    return inside.partition(".")[0] not in doors
