"""Runs network commands: ip(8), nsenter(1), unshare(1), and the library behind nft(8)."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import shutil
import threading
from collections.abc import AsyncIterator, Sequence

from snapshotter.errors import Unsupported

_PATIENCE_S = 10.0
_LIBRARY = "libnftables.so.1"
_JSON = 1 << 4
"""NFT_CTX_OUTPUT_JSON."""


def check() -> None:
    """Raises Unsupported that names the missing packages."""
    packages = {"ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
    missing = sorted({package for tool, package in packages.items() if shutil.which(tool) is None})
    if not has_nft():
        missing.append("nftables")
    if missing:
        raise Unsupported(
            f"a separate network requires {' and '.join(missing)}; on Debian: apt-get install "
            f"{' '.join(missing)}"
        )


async def run(*argv: str, stdin: str = "", fds: Sequence[int] = ()) -> str:
    """Run a short command and return its output. Raises Unsupported with its error output."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *argv, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=fds
    )
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
        raise Unsupported(_refusal(" ".join(argv[:3]), errors.decode(errors="replace")))
    return out.decode()


def has_nft() -> bool:
    """Whether nftables is installed."""
    try:
        _library()
    except OSError:
        return False
    return True


@functools.cache
def _library() -> ctypes.CDLL:
    """libnftables(3). Raises OSError."""
    library = ctypes.CDLL(_LIBRARY)
    library.nft_ctx_new.restype = ctypes.c_void_p
    library.nft_ctx_new.argtypes = [ctypes.c_uint32]
    for name in ("nft_ctx_get_output_buffer", "nft_ctx_get_error_buffer"):
        getattr(library, name).restype = ctypes.c_char_p
    for name in (
        "nft_ctx_get_output_buffer",
        "nft_ctx_get_error_buffer",
        "nft_ctx_buffer_output",
        "nft_ctx_buffer_error",
        "nft_ctx_free",
    ):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    library.nft_run_cmd_from_buffer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.nft_ctx_output_set_flags.argtypes = [ctypes.c_void_p, ctypes.c_uint]
    return library


_one_at_a_time = threading.Lock()
"""The library has process-wide state."""


def nft_here(orders: str, *, as_json: bool = False) -> str:
    """Change or list the rules of this thread's network namespace; returns the output. Raises
    Unsupported.

    Runs in this process: starting nft(8) takes eight times as long as the operation.
    """
    library = _library()
    with _one_at_a_time:
        context = library.nft_ctx_new(0)
        try:
            library.nft_ctx_buffer_output(context)
            library.nft_ctx_buffer_error(context)
            library.nft_ctx_output_set_flags(context, _JSON if as_json else 0)
            failed = library.nft_run_cmd_from_buffer(context, orders.encode())
            out, errors = (
                library.nft_ctx_get_output_buffer(context),
                library.nft_ctx_get_error_buffer(context),
            )
        finally:
            library.nft_ctx_free(context)
    if failed:
        raise Unsupported(_refusal("nft", errors.decode(errors="replace")))
    return str(out.decode())


async def nft(orders: str, *, as_json: bool = False) -> str:
    """The same in the host's namespace, in a thread."""
    return await asyncio.to_thread(nft_here, orders, as_json=as_json)


def _refusal(what: str, errors: str) -> str:
    message = " ".join(errors.split())
    return (
        f"{what}: {message[-300:]}; a separate network requires CAP_NET_ADMIN, veth and nftables "
        f"in the kernel"
    )


@contextlib.asynccontextmanager
async def fresh_namespace() -> AsyncIterator[int]:
    """A network namespace without processes. Raises Unsupported."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        "unshare", "--net", "sh", "-c", "echo; read _", stdin=pipe, stdout=pipe, stderr=pipe
    )
    try:
        assert child.stdout is not None
        assert child.stderr is not None
        if not await child.stdout.readline():
            message = (await child.stderr.read()).decode(errors="replace").strip()
            raise Unsupported(
                f"{message or 'unshare exited'}; a network namespace requires CAP_SYS_ADMIN and a "
                f"kernel with CONFIG_NET_NS"
            )
        namespace = os.open(f"/proc/{child.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield namespace
        finally:
            os.close(namespace)
    finally:
        await child.communicate(b"")
