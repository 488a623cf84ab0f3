"""The network of one image build: its own namespace with internet access, or the host's.

In its own namespace (`snapshotter.linux.slot_network`) a build reaches the internet and what
`egress` allows, and accepts no connections; the host's 127.0.0.1 and abstract Unix sockets are in
another namespace. A package index or proxy that listens on the host's loopback is unreachable
there, so a build whose pip is configured for one uses the host's network. In either network a build
cannot create Unix sockets (`snapshotter.images.sandbox_child`)."""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from snapshotter.errors import Unsupported
from snapshotter.linux import net_commands, slot_network
from snapshotter.linux.dns_servers import NetworkAccess
from snapshotter.linux.egress_policy import PUBLIC
from snapshotter.linux.host_network import interfaces

_ON_LOOPBACK = re.compile(
    r"(?:://|@|^|[\s=,])(?:localhost|127(?:\.[0-9]{1,3}){3}|\[::1\])(?=[:/\s,]|$)",
    re.IGNORECASE | re.MULTILINE,
)
"""A loopback address of the host in a URL, after user and password, or as a proxy without a
scheme."""


class BuildNetwork(enum.StrEnum):
    """The network that builds use (`snapshotter.build_network`)."""

    AUTO = "auto"
    OWN = "own"
    HOST = "host"


def _public() -> NetworkAccess:
    return NetworkAccess(egress=PUBLIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildNetworkPolicy:
    """The network of builds with a uid: its kind, and what builds reach in their own."""

    kind: BuildNetwork = BuildNetwork.AUTO
    access: NetworkAccess = field(default_factory=_public)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The network of one build.

    Attributes:
        namespace: descriptor of its network namespace; None = the host's.
        name_servers: the content of its /etc/resolv.conf; None = the host's.
        remark: why the host's network is used; "" otherwise.
    """

    namespace: int | None = None
    name_servers: str | None = None
    remark: str = ""


def is_on_loopback(texts: Iterable[str]) -> bool:
    """Whether any text (a URL, or a file that contains some) names a server on this machine's
    loopback."""
    return any(_ON_LOOPBACK.search(text) for text in texts)


@contextlib.asynccontextmanager
async def joined(policy: BuildNetworkPolicy, texts: Iterable[str]) -> AsyncIterator[Joined]:
    """Provide the network of a build whose pip is configured by `texts`. Raises Unsupported if a
    network of its own is requested and cannot be made; with AUTO, too, while slots have such
    networks: the machine supports them, and a failure, which a tenant might cause, must not open
    the host's."""
    access = policy.access
    if policy.kind is BuildNetwork.HOST:
        yield Joined(remark="snapshotter.build_network is host")
        return
    if policy.kind is BuildNetwork.AUTO and is_on_loopback(texts):
        yield Joined(remark="pip's index or proxy is on this machine's loopback")
        return
    async with contextlib.AsyncExitStack() as stack:
        try:
            namespace = await stack.enter_async_context(net_commands.fresh_namespace())
            await net_commands.run(
                "nsenter",
                f"--net=/proc/self/fd/{namespace}",
                "ip",
                "link",
                "set",
                "lo",
                "up",
                fds=(namespace,),
            )
            name = await slot_network.connect(namespace, access.egress, access.name_servers)
        except (Unsupported, OSError) as e:
            await stack.aclose()
            if policy.kind is BuildNetwork.OWN or interfaces():
                raise Unsupported(
                    f"cannot create the build's own network (snapshotter.build_network: "
                    f"{policy.kind}): {e}"
                ) from e
            yield Joined(remark=str(e))
            return
        stack.push_async_callback(_delete, name)
        yield Joined(namespace=namespace, name_servers=access.name_servers.find().text)


async def _delete(name: str) -> None:
    await slot_network.remove([name])
    await slot_network.sweep()
