"""Faults that a test chooses."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tests.fakes.kubernetes.rbac import Attributes, Rbac


@dataclass(kw_only=True)
class Fault:
    """What happens to requests that match; the first fault that matches is taken.

    Attributes:
        status: answer this error (429, 500, 503, …); 0 = none. retry_after_s: header Retry-After of
        it. message: of the Status document; None = a usual one. delay_s: hold the request back that
        long first. hang: never answer. reset: cut the connection (RST) without an answer. after:
        `reset`, `hang` and `status` happen after the request did its work: the client cannot know.
        times: for how many requests; None = until removed. verb, resource, path: only requests like
        that; `path` is a regular expression searched in path and query.
    """

    status: int = 0
    retry_after_s: float | None = None
    message: str | None = None
    delay_s: float = 0.0
    hang: bool = False
    reset: bool = False
    after: bool = False
    times: int | None = None
    verb: str | None = None
    resource: str | None = None
    path: str | None = None

    def fits(self, verb: str, resource: str, path: str) -> bool:
        """Whether a request is one of those."""
        if (
            self.times == 0
            or (self.verb is not None and verb != self.verb)
            or (self.resource is not None and resource != self.resource)
        ):
            return False
        return self.path is None or re.search(self.path, path) is not None


@dataclass(kw_only=True)
class Faults:
    """All that is wrong just now.

    Attributes:
        chosen: faults of single requests. cut_watches_every_s: how long a watch lives before its
        connection is cut; None = as long as it asked for. watch_gone_as_status: a watch from too
        old a version gets HTTP 410 instead of an ERROR event. clock_skew_s: how far the server's
        clock is ahead. refusals: (resource, message): an admission webhook that refuses every write
        of it.
    """

    chosen: list[Fault] = field(default_factory=list)
    cut_watches_every_s: float | None = None
    watch_gone_as_status: bool = False
    clock_skew_s: float = 0.0
    refusals: list[tuple[str, str]] = field(default_factory=list)

    def add(self, fault: Fault) -> Fault:
        """Choose a fault; returns it, for `remove`."""
        self.chosen.append(fault)
        return fault

    def remove(self, fault: Fault) -> None:
        """It is over."""
        self.chosen.remove(fault)

    def clear(self) -> None:
        """Nothing is wrong any more."""
        self.__dict__.update(Faults().__dict__)

    def take(self, verb: str, resource: str, path: str) -> Fault | None:
        """The fault of this request, counted."""
        for fault in self.chosen:
            if fault.fits(verb, resource, path):
                if fault.times is not None:
                    fault.times -= 1
                return fault
        return None


@dataclass(kw_only=True)
class Denied:
    """A right that clients do not have; `*` stands for all. `namespace` None = everywhere."""

    verb: str = "*"
    resource: str = "*"
    group: str = "*"
    namespace: str | None = None


ADMIN = "kubernetes-admin"


@dataclass(kw_only=True)
class Rights:
    """What clients may do: the administrator everything but what is denied; a service account what
    RBAC allows it besides.

    Attributes:
        rbac: of the server.
        accounts: bearer token → user name; whoever shows another token is the administrator.
    """

    rbac: Rbac
    denied: list[Denied] = field(default_factory=list)
    accounts: dict[str, str] = field(default_factory=dict)

    def add_account(self, namespace: str, name: str) -> str:
        """Know a service account; returns its token."""
        token = f"token-of-{namespace}-{name}"
        self.accounts[token] = f"system:serviceaccount:{namespace}:{name}"
        return token

    def user_of(self, authorization: str) -> str:
        """By a request's header Authorization."""
        return self.accounts.get(authorization.removeprefix("Bearer "), ADMIN)

    def deny(
        self, verb: str, resource: str, *, group: str = "*", namespace: str | None = None
    ) -> Denied:
        """Take a right away: `deny("list", "pods")`, `deny("patch", "deployments/scale")`."""
        one = Denied(verb=verb, resource=resource, group=group, namespace=namespace)
        self.denied.append(one)
        return one

    def is_allowed(self, asked: Attributes) -> bool:
        """Whether a request may be made."""
        is_denied = any(
            one.verb in ("*", asked.verb)
            and one.resource in ("*", asked.resource)
            and one.group in ("*", asked.group)
            and (one.namespace is None or one.namespace == asked.namespace)
            for one in self.denied
        )
        return not is_denied and (asked.user == ADMIN or self.rbac.is_allowed(asked))
