"""The programs that know networks: ip(8), nft(8), nsenter(1), unshare(1). Started, given their orders, and heard when they complain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Sequence

from snapshotter.errors import Unsupported

_PATIENCE_S = 10.0


def check() -> None:
    """Raises Unsupported with the packages that are missing."""
    packages = {"ip": "iproute2", "nft": "nftables", "nsenter": "util-linux", "unshare": "util-linux"}
    missing = sorted({package for tool, package in packages.items() if shutil.which(tool) is None})
    if missing:
        raise Unsupported(f"a network of its own needs {' and '.join(missing)}; on Debian: apt-get install {' '.join(missing)}")


async def run(*argv: str, stdin: str = "", fds: Sequence[int] = ()) -> str:
    """Run a short command; what it printed. Raises Unsupported with what it complained about."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=fds)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            out, errors = await child.communicate(stdin.encode())
    except TimeoutError as e:
        raise Unsupported(f"{argv[0]} did not answer in {_PATIENCE_S:g} s") from e
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        said = " ".join(errors.decode(errors="replace").split())
        raise Unsupported(f"{' '.join(argv[:3])}: {said[-300:]}; a network of its own needs CAP_NET_ADMIN, veth and nftables in the kernel")
    return out.decode()


@contextlib.asynccontextmanager
async def fresh_namespace() -> AsyncIterator[int]:
    """A network namespace that nobody is in. Raises Unsupported."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec("unshare", "--net", "sh", "-c", "echo; read _", stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        assert child.stdout is not None
        assert child.stderr is not None
        if not await child.stdout.readline():
            said = (await child.stderr.read()).decode(errors="replace").strip()
            raise Unsupported(f"{said or 'unshare ended'}; a network namespace needs CAP_SYS_ADMIN and a kernel with CONFIG_NET_NS")
        namespace = os.open(f"/proc/{child.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield namespace
        finally:
            os.close(namespace)
    finally:
        await child.communicate(b"")
