"""Where tensors are delivered to: memory of their own, on the host or on a GPU, filled from a pool
piece by piece.

A device's sends are in order and may go on after `send` returned: what is sent stays untouched
until a `mark` made afterwards has been waited for, and nobody looks at the tensors before `settle`.
Foreign errors leave as DeviceFailed."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from weight_cache.errors import DeviceFailed
from weight_cache.tensors.pool import Pin

Wait = Callable[[], None]
"""Returns when something has happened."""


class Device(Protocol):
    """One place for tensors. Threads call it at once."""

    @property
    def name(self) -> str:
        """As torch names it: `cpu`, `cuda:0`."""

    @property
    def pin(self) -> Pin | None:
        """How memory is registered so that the device can fetch from it; None when it makes no
        difference."""

    def allocate(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Room for one tensor. Raises DeviceFailed."""

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy bytes: both are flat tensors of uint8, of one length; `target` is a stretch of what
        `allocate` gave. Raises DeviceFailed."""

    def mark(self) -> Wait:
        """Something to wait for until all that was sent before has left its source. The wait raises
        DeviceFailed."""

    def settle(self) -> None:
        """Wait until everything that was sent is where it belongs. Raises DeviceFailed. Also called
        after a failure; callable twice."""


class CpuDevice:
    """The host's memory. `verify`: `settle` reads back what was sent and compares checksums
    (crc32).

    The copying is memmove(3), not torch's: that would start threads, and a process with threads
    cannot be forked. The lock guards the list of what was sent."""

    name = "cpu"
    pin = None

    def __init__(self, *, verify: bool = False) -> None:
        self._verify = verify
        self._sent: list[tuple[torch.Tensor, int]] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<CpuDevice{', verifying' if self._verify else ''}>"

    def allocate(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """See Device."""
        try:
            return torch.empty(shape, dtype=dtype, device="cpu")
        except RuntimeError as e:  # torch has no narrower one
            raise DeviceFailed(f"cpu refuses {dtype} {list(shape)}: {e}") from e

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See Device; done when it returns."""
        # lets go of the interpreter's lock
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
        if self._verify:
            with self._lock:
                self._sent.append((target, zlib.crc32(as_bytes(source))))

    def mark(self) -> Wait:
        """See Device."""
        return _nothing

    def settle(self) -> None:
        """See Device. Raises DeviceFailed for bytes that are not those that were sent."""
        with self._lock:
            sent, self._sent = self._sent, []
        wrong = sum(zlib.crc32(as_bytes(target)) != checksum for target, checksum in sent)
        if wrong:
            raise DeviceFailed(
                f"cpu holds other bytes than were sent in {wrong} of {len(sent)} transfers"
            )


class CudaDevice:
    """A GPU. Copies run in a stream of their own (`cudaMemcpyAsync`), beside whatever else the
    process computes there.

    CUDA C++ Programming Guide, "Asynchronous Concurrent Execution": only from pinned memory does a
    copy leave the host's threads alone; from other memory it is correct, and slower. Raises
    DeviceFailed when there is no such device."""

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise DeviceFailed(f"{device}: torch {torch.__version__} sees no CUDA device here")
        if (device.index or 0) >= torch.cuda.device_count():
            raise DeviceFailed(
                f"{device}: this process sees {torch.cuda.device_count()} CUDA devices, counted "
                f"from 0"
            )
        with self._translated("cannot be used"):
            self._device = torch.device(
                "cuda", torch.cuda.current_device() if device.index is None else device.index
            )
            self._stream = torch.cuda.Stream(device=self._device)  # type: ignore[no-untyped-call]
        self.name = str(self._device)
        self.pin: Pin | None = CudaPin(self._device)

    def __repr__(self) -> str:
        return f"<CudaDevice {self.name}>"

    def allocate(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """See Device. The room may be what earlier work just gave back: the stream waits for that
        work before it writes."""
        with self._translated(f"refuses {dtype} {list(shape)}"):
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            return tensor

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See Device."""
        with self._translated("refuses bytes"), torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Wait:
        """See Device. The wait sleeps (`blocking`) instead of burning a core."""
        with self._translated("cannot mark"):
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return lambda: self._wait(event)

    def settle(self) -> None:
        """See Device."""
        with self._translated("lost what was sent"):
            self._stream.synchronize()

    def _wait(self, event: torch.cuda.Event) -> None:
        with self._translated("lost what was sent"):
            event.synchronize()

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:  # out of memory and CUDA's own errors are such
            raise DeviceFailed(f"{getattr(self, 'name', 'cuda')} {what}: {e}") from e


class CudaPin:
    """Page-locks memory for the driver (`cudaHostRegister`, portable: for all devices of the
    process)."""

    _PORTABLE = 1  # cudaHostRegisterPortable

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, length_bytes: int) -> bool:
        """See Pin. False also where a limit (RLIMIT_MEMLOCK) forbids it: copies then are correct,
        and slower."""
        try:
            with torch.cuda.device(self._device):
                if int(_runtime().cudaHostRegister(address, length_bytes, self._PORTABLE)) == 0:
                    return True
                # takes the refusal along (cudaGetLastError), for which later work would be blamed
                torch.zeros(1, device=self._device)
        except RuntimeError:
            return False
        return False

    def unregister(self, address: int) -> None:
        """See Pin."""
        with contextlib.suppress(RuntimeError):
            _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    """CUDA's own functions, as torch exports them."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def resolve_device(where: torch.device | str) -> Device:
    """The device of that name. Raises DeviceFailed for what is neither `cpu` nor a CUDA device."""
    try:
        device = torch.device(where)
    except (RuntimeError, TypeError) as e:
        raise DeviceFailed(f"{where!r} names no device: {e}") from e
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        return CudaDevice(device)
    raise DeviceFailed(
        f"{device}: tensors are delivered to cpu and cuda; load them to cpu and move them with "
        f".to({str(device)!r})"
    )


def flatten_to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a tensor of uint8 over the same memory."""
    return tensor.view(-1).view(torch.uint8)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a flat tensor of uint8 on the host; valid while the tensor is."""
    return memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")


def _nothing() -> None:
    """For what is done already."""
