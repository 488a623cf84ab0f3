"""Changes in a process that becomes an instance: it is a copy, so everything unique is created
anew."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from pilotlight.core.transport.calls_socket import INSTANCE_VARIABLE


def reseed() -> None:
    """Reseed every generator with its own state: random, OpenSSL, temporary names, uuid1,
    multiprocessing, numpy, torch (if loaded).

    `os.urandom`, `secrets` and `uuid4` ask the kernel and need no reseeding. Generators that user
    code creates (`numpy.random.default_rng()`, `random.Random()`) are not reseeded: create them in
    enter(snap=False). The hash seed and, after a restore, the pid stay the same, so modules do not
    detect a fork."""
    random.seed()
    tempfile._name_sequence = None  # type: ignore[attr-defined]  # the module's own after-fork state; made anew at the next use
    _new_names()
    if ssl := sys.modules.get("ssl"):
        ssl.RAND_add(os.urandom(32), 32.0)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed(int.from_bytes(os.urandom(4)))
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(int.from_bytes(os.urandom(8)) >> 1)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(int.from_bytes(os.urandom(8)) >> 1)


def _new_names() -> None:
    """Renew identities: uuid's node (RFC 9562 §6.10), the cached host name, multiprocessing's key
    and directory."""
    uuid: Any = sys.modules.get("uuid")
    platform: Any = sys.modules.get("platform")
    if uuid is not None:
        uuid._node = int.from_bytes(os.urandom(6)) | 1 << 40  # multicast bit: no machine's address
        # libuuid's clock sequence was copied, too
        uuid._last_timestamp = uuid._generate_time_safe = uuid._UuidCreate = None
    if platform is not None:
        platform._uname_cache = None
    # existing children use the old key
    if (process := sys.modules.get("multiprocessing.process")) and not process._children:
        config = process.current_process()._config
        config["authkey"] = process.AuthenticationString(os.urandom(32))
        config.pop("tempdir", None)
    if synchronize := sys.modules.get("multiprocessing.synchronize"):
        synchronize.SemLock._rand = tempfile._RandomNameSequence()  # type: ignore[attr-defined]  # as the class itself makes it


def warm_resume_path() -> None:
    """Reseed once before the snapshot: its lazy initialization (2 ms for OpenSSL's generator) would
    otherwise be part of every wake."""
    reseed()


def take_environment(instance: str, env: Mapping[str, str]) -> None:
    """Set the instance's id and its secrets as environment variables."""
    os.environ.update(env)
    os.environ[INSTANCE_VARIABLE] = instance


def raise_threads(*, cpu: float, variables: Sequence[str]) -> None:
    """Raise the number of threads from one, which a snapshot needs, to the whole cores of the
    instance's CPU share.

    Args:
        cpu: the share in cores.
        variables: the environment variables that the platform, not the user, set to one; they apply
            to libraries that are loaded from now on.
    """
    threads = min(int(cpu), os.cpu_count() or 1)
    if threads <= 1:
        return
    for name in variables:
        os.environ[name] = "true" if name == "TOKENIZERS_PARALLELISM" else str(threads)
    torch: Any = sys.modules.get("torch")
    # one thread: no pool exists that the fork could have lost
    if torch is not None and torch.get_num_threads() == 1:
        torch.set_num_threads(threads)
