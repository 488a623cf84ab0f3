"""The dashboard's pages in sections: two rows of links, the second of the section that is open.

A key sees only the links that it may follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


class Viewer(Protocol):
    """What decides which links are shown: see `PageContext`."""

    @property
    def path(self) -> str: ...
    @property
    def is_operator(self) -> bool: ...
    @property
    def sees_instances(self) -> bool: ...
    @property
    def sees_tenant(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class PageLink:
    """A page.

    Attributes:
        below: prefixes of paths whose pages belong to this one.
        needs: the viewer's property that must hold; "" = every key sees it.
    """

    text: str
    path: str
    below: tuple[str, ...] = ()
    needs: str = ""

    def holds(self, path: str) -> bool:
        """Whether `path` is this page or one that belongs to it."""
        return path == self.path or path.startswith(self.below)


@dataclass(frozen=True, slots=True)
class Section:
    """Pages that belong together; the section's own link leads to the first of them."""

    text: str
    pages: tuple[PageLink, ...]

    @property
    def path(self) -> str:
        """Where its link leads."""
        return self.pages[0].path

    def holds(self, path: str) -> bool:
        """Whether `path` is one of its pages."""
        return any(page.holds(path) for page in self.pages)


def _page(text: str, name: str, needs: str = "sees_instances", *more: str) -> PageLink:
    path = f"/dashboard/{name}"
    return PageLink(text, path, (f"{path}/", *more), needs)


SECTIONS = (
    Section("Overview", (PageLink("Overview", "/dashboard"),)),
    Section(
        "Functions",
        (
            _page("Apps", "apps", "sees_instances", "/dashboard/functions/"),
            _page("Releases", "releases"),
            _page("Experiments", "experiments"),
            _page("Objectives", "objectives"),
            _page("Drift", "drift"),
            _page("Models", "models"),
        ),
    ),
    Section(
        "Calls",
        (
            _page("Calls", "calls", ""),
            _page("Logs", "logs"),
            _page("Traces", "traces"),
        ),
    ),
    Section(
        "Billing",
        (
            _page("Usage", "usage", ""),
            _page("Budgets & quotas", "budgets", ""),
            _page("Invoices", "invoices", "sees_tenant"),
        ),
    ),
    Section("Keys & secrets", (_page("Keys & secrets", "access"),)),
    Section(
        "Platform",
        (
            PageLink("Platform", "/dashboard/platform", needs="is_operator"),
            _page("Instances", "platform/instances", "is_operator"),
            _page("Storage", "platform/storage", "is_operator"),
        ),
    ),
)


def sections(viewer: Viewer) -> Iterator[Section]:
    """Return what the viewer may open."""
    for section in SECTIONS:
        pages = tuple(p for p in section.pages if not p.needs or getattr(viewer, p.needs))
        if pages:
            yield Section(section.text, pages)
