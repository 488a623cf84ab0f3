"""Devices that tensors are copied to: memory on the host or on a GPU, filled from a pool piece by
piece.

A device's copies run in order and may continue after `send` returned: the source must stay
unchanged until a `mark` made after the `send` has been waited for, and the tensors must not be read
before `settle`. Errors of other libraries are raised as DeviceFailed."""

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
"""Blocks until an event has occurred."""


class Device(Protocol):
    """One device for tensors. Called from several threads."""

    @property
    def name(self) -> str:
        """The torch name: `cpu`, `cuda:0`."""

    @property
    def pin(self) -> Pin | None:
        """Registers memory for direct access by the device; None if it makes no difference."""

    def allocate(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Allocate one tensor. Raises DeviceFailed."""

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy bytes between flat uint8 tensors of equal length; `target` is a slice of an
        allocated tensor. Raises DeviceFailed."""

    def mark(self) -> Wait:
        """Return a wait for all previous copies to have read their source. The wait raises
        DeviceFailed."""

    def settle(self) -> None:
        """Wait until all copies have completed. Raises DeviceFailed. Also called after a failure,
        and may be called twice."""


class CpuDevice:
    """The host's memory. `verify`: `settle` reads the copied bytes and compares checksums (crc32).

    Copies with memmove(3) and not with torch, which would start threads: a process with threads
    cannot be forked. The lock guards the list of copies."""

    name = "cpu"
    pin = None

    def __init__(self, *, verify: bool = False) -> None:
        self._verify = verify
        self._sent: list[tuple[torch.Tensor, int]] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<CpuDevice{', verifying' if self._verify else ''}>"

    def allocate(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Allocate on the host. Raises DeviceFailed."""
        try:
            return torch.empty(shape, dtype=dtype, device="cpu")
        except RuntimeError as e:  # torch raises no narrower type
            raise DeviceFailed(f"cpu refuses {dtype} {list(shape)}: {e}") from e

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the bytes before returning."""
        # releases the GIL
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
        if self._verify:
            with self._lock:
                self._sent.append((target, zlib.crc32(as_bytes(source))))

    def mark(self) -> Wait:
        """Return at once: copies are synchronous."""
        return _nothing

    def settle(self) -> None:
        """Verify the copies, if enabled. Raises DeviceFailed if the bytes differ."""
        with self._lock:
            sent, self._sent = self._sent, []
        wrong = sum(zlib.crc32(as_bytes(target)) != checksum for target, checksum in sent)
        if wrong:
            raise DeviceFailed(
                f"cpu holds other bytes than were copied in {wrong} of {len(sent)} transfers"
            )


class CudaDevice:
    """A GPU. Copies run in their own stream (`cudaMemcpyAsync`), concurrently with other work of
    the process.

    CUDA C++ Programming Guide, "Asynchronous Concurrent Execution": only copies from pinned memory
    are asynchronous to the host; from other memory they are correct but slower. Raises DeviceFailed
    if there is no such device."""

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise DeviceFailed(f"{device}: torch {torch.__version__} finds no CUDA device")
        if (device.index or 0) >= torch.cuda.device_count():
            raise DeviceFailed(
                f"{device}: this process sees {torch.cuda.device_count()} CUDA devices, counted "
                f"from 0"
            )
        with self._translated("cannot be used"):
            self._device = torch.device(
                "cuda", torch.cuda.current_device() if device.index is None else device.index
            )
            self._stream = torch.cuda.Stream(device=self._device)
        self.name = str(self._device)
        self.pin: Pin | None = CudaPin(self._device)

    def __repr__(self) -> str:
        return f"<CudaDevice {self.name}>"

    def allocate(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Allocate on the GPU. The memory may have been freed by earlier work; the stream waits for
        that work before it writes."""
        with self._translated(f"refuses {dtype} {list(shape)}"):
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            return tensor

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue a copy in the stream."""
        with self._translated("refuses bytes"), torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Wait:
        """Record an event in the stream. The wait sleeps (`blocking`) instead of spinning."""
        with self._translated("cannot mark"):
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
        return lambda: self._wait(event)

    def settle(self) -> None:
        """Wait for the stream."""
        with self._translated("lost what was sent"):
            self._stream.synchronize()

    def _wait(self, event: torch.cuda.Event) -> None:
        with self._translated("lost what was sent"):
            event.synchronize()

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:  # includes out of memory and CUDA errors
            raise DeviceFailed(f"{getattr(self, 'name', 'cuda')} {what}: {e}") from e


class CudaPin:
    """Page-locks memory for the driver (`cudaHostRegister`, portable: for all devices of the
    process)."""

    _PORTABLE = 1  # cudaHostRegisterPortable

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, length_bytes: int) -> bool:
        """Register memory. False also if a limit (RLIMIT_MEMLOCK) forbids it: copies are then
        correct but slower."""
        try:
            with torch.cuda.device(self._device):
                if int(_runtime().cudaHostRegister(address, length_bytes, self._PORTABLE)) == 0:
                    return True
                # clears the error (cudaGetLastError), which later calls would report
                torch.zeros(1, device=self._device)
        except RuntimeError:
            return False
        return False

    def unregister(self, address: int) -> None:
        """Unregister memory; never raises."""
        with contextlib.suppress(RuntimeError):
            _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    """The CUDA runtime API, as torch exports it."""
    return torch.cuda.cudart()


def resolve_device(where: torch.device | str) -> Device:
    """The device of that name. Raises DeviceFailed if it is neither `cpu` nor a CUDA device."""
    try:
        device = torch.device(where)
    except (RuntimeError, TypeError) as e:
        raise DeviceFailed(f"{where!r} is not a device: {e}") from e
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        return CudaDevice(device)
    raise DeviceFailed(
        f"{device}: tensors can be loaded to cpu and cuda only; load them to cpu and move them "
        f"with .to({str(device)!r})"
    )


def flatten_to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a tensor of uint8 over the same memory."""
    return tensor.view(-1).view(torch.uint8)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a flat uint8 tensor on the host; valid while the tensor exists."""
    return memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")


def _nothing() -> None:
    """A wait for nothing."""
