"""Loads safetensors files as tensors: on the CPU without a copy, on a GPU at the speed of the disk.

    state = pilotlight.weights.load(minilm.path)                              # mapped: the file's own pages, shared by all instances
    state = pilotlight.weights.load(llama.path, device="cuda:0")              # read by several threads, copied beside other work
    pilotlight.weights.load_into(model, llama.path, device="cuda:0")
    model = pilotlight.weights.from_pretrained(AutoModel, minilm.path)        # transformers, with its own rules

Works wherever torch is installed: in a worker, in a notebook, in a test. torch and transformers are
imported by the calls that need them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

    from weight_cache.tensors.files import TensorFile
    from weight_cache.tensors.pool import Pool
    from weight_cache.types import Tensor

Where: TypeAlias = "str | torch.device | Callable[[str], str | torch.device]"
"""One device for all tensors, or a function that maps a tensor's name to its device."""
Mode = Literal["auto", "mapped", "pool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Result of `load_into`: names that only the module has, and names that only the file has."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load(
    path: str | Path,
    *,
    device: Where = "cpu",
    names: Collection[str] | None = None,
    mode: Mode = "auto",
    pool: Pool | None = None,
) -> Mapping[str, torch.Tensor]:
    """Load the tensors of a safetensors file, or of a directory of them, by name, with the dtypes
    and bytes of the file.

    Args:
        device: `cpu`, `cuda:0`, or a function that returns the device of each tensor.
        names: load only these.
        mode: for tensors on the CPU. `mapped`: pages of the file, created on look-up, read on
            access, shared by all processes, and not part of a snapshot. `pool`: read now into
            private memory, by several threads; blocks a snapshot of the process. `auto`: mapped.
            Tensors for a GPU always pass through a pool.
        pool: the pool to read into, from `pool(...)`; the caller keeps it for the next load. None:
            a pool for this call only.

    Raises TensorsInvalid (an invalid or truncated file; a missing name), DeviceFailed, PoolFull,
    OSError; for a mapped file, TensorsInvalid is raised when its tensors are looked up."""
    from weight_cache.tensors.files import read_files

    if mode not in ("auto", "mapped", "pool"):
        raise ValueError(f"mode = {mode!r}: expected 'auto', 'mapped' or 'pool'")
    files = read_files(Path(path))
    if mode != "pool" and not callable(device) and _is_cpu(device):
        return _mapped(files, names, path)
    found = _chosen(files, names, path)
    devices = {name: device(name) if callable(device) else device for name in found}
    stay = [name for name, where in devices.items() if _is_cpu(where)]
    tensors: dict[str, torch.Tensor] = {}
    if stay and mode != "pool":
        tensors |= _mapped(files, stay, path)
    elif stay:
        tensors |= _read([found[name] for name in stay], pool)
    if len(stay) < len(found):
        tensors |= _delivered(
            [(*found[name], str(where)) for name, where in devices.items() if not _is_cpu(where)],
            pool,
        )
    return {name: tensors[name] for name in found}


def pool(size_bytes: int, *, device: str | torch.device = "cpu") -> Pool:
    """Allocate a pool to read into, in advance; pinned with `device`'s driver if that is a GPU
    (`is_pinned`).

    Close it, or use it in a `with`. Raises PoolFull if the machine lacks the memory, DeviceFailed
    if the device does not exist."""
    from weight_cache.tensors.devices import resolve_device
    from weight_cache.tensors.pool import Pool

    return Pool(size_bytes, pin=resolve_device(device).pin)


def load_into(
    module: torch.nn.Module,
    path: str | Path,
    *,
    device: Where = "cpu",
    strict: bool = True,
    mode: Mode = "auto",
) -> Loaded:
    """Assign the tensors of `path` to `module` (built on any device, also `meta`) as its parameters
    and buffers, without copying them.

    Tied parameters remain tied; dtypes become those of the file. Raises TensorsInvalid for a tensor
    of another shape and, if `strict`, for names on one side only and for tensors that would remain
    without memory; the module may then already have some of the tensors."""
    from weight_cache.errors import TensorsInvalid
    from weight_cache.tensors.files import read_files, tensor_locations

    there = set(tensor_locations(read_files(Path(path))))
    state = module.state_dict(keep_vars=True)
    tied = _tied(state, there)
    loaded = Loaded(
        missing=tuple(sorted(set(state) - there - set(tied))),
        unexpected=tuple(sorted(there - set(state))),
    )
    if strict and (loaded.missing or loaded.unexpected):
        differences = f"missing {_few(loaded.missing)}; unexpected {_few(loaded.unexpected)}"
        raise TensorsInvalid(
            f"{path} and the module differ: {differences}. Use strict=False to ignore this"
        )
    tensors = load(path, device=device, names=(there & set(state)) - set(tied), mode=mode)
    try:
        module.load_state_dict(dict(tensors), strict=False, assign=True)
    except RuntimeError as e:  # shapes; torch has no narrower one
        raise TensorsInvalid(f"{path} does not fit the module: {e}") from e
    for name, source in tied.items():
        _set(module, name, _get(module, source))
    _move_the_rest(module, set(tensors) | set(tied), device)
    without = [
        name
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        if tensor.is_meta
    ]
    if strict and without:
        raise TensorsInvalid(
            f"{path} does not contain {_few(without)}, which the module creates in its "
            f"constructor: build it without `meta`"
        )
    return loaded


def from_pretrained(
    auto_class: Any, path: str | Path, *, device: str | torch.device = "cpu", **kwargs: Any
) -> Any:
    """Call transformers' `auto_class.from_pretrained(path, **kwargs)` with tensors that are mapped,
    or delivered to `device`.

    transformers builds the model, renames and ties tensors by its rules, and computes those that no
    file contains; only reading is replaced. On the CPU nothing is copied unless a conversion is
    requested (`dtype=`, quantization). Raises as `load` and transformers do."""
    from pilotlight import pretrained

    return pretrained.from_pretrained(auto_class, Path(path), load=load, device=device, **kwargs)


def _mapped(
    files: list[TensorFile], names: Collection[str] | None, path: str | Path
) -> Mapping[str, torch.Tensor]:
    from weight_cache.tensors.mapped import MappedTensors

    tensors = MappedTensors(files, names=names)
    _check_names(tensors, names or (), path)
    return tensors


def _read(found: list[tuple[TensorFile, Tensor]], pool: Pool | None) -> dict[str, torch.Tensor]:
    """Read the tensors into the pool, where they remain."""
    from weight_cache.tensors.delivery import read_into, room_bytes
    from weight_cache.tensors.pool import Pool

    groups = _by_file(found)
    needed = sum(room_bytes(tensors) for tensors in groups.values())
    with _keep_open(pool) if pool else Pool(max(1, needed)) as memory:
        parts = [read_into(path, tensors, pool=memory) for path, tensors in groups.items()]
    return {name: tensor for part in parts for name, tensor in part.items()}


def _delivered(
    found: list[tuple[TensorFile, Tensor, str]], pool: Pool | None
) -> dict[str, torch.Tensor]:
    """Deliver the tensors to their devices, through the pool."""
    from weight_cache.tensors.delivery import deliver, pool_bytes
    from weight_cache.tensors.devices import resolve_device
    from weight_cache.tensors.pool import Pool

    devices = {where: resolve_device(where) for where in {where for _, _, where in found}}
    place = {tensor.name: devices[where] for _, tensor, where in found}
    groups = _by_file([(file, tensor) for file, tensor, _ in found])
    needed = max(pool_bytes(tensors) for tensors in groups.values())
    with _keep_open(pool) if pool else Pool(needed, pin=next(iter(devices.values())).pin) as memory:
        parts = [
            deliver(path, [(t, place[t.name]) for t in tensors], pool=memory)
            for path, tensors in groups.items()
        ]
    return {name: tensor for part in parts for name, tensor in part.items()}


@contextlib.contextmanager
def _keep_open(pool: Pool) -> Iterator[Pool]:
    """Yield a pool without closing it: the caller owns it."""
    yield pool


def _by_file(found: Iterable[tuple[TensorFile, Tensor]]) -> dict[Path, list[Tensor]]:
    groups: dict[Path, list[Tensor]] = {}
    for file, tensor in found:
        groups.setdefault(file.path, []).append(tensor)
    return groups


def _chosen(
    files: list[TensorFile], names: Collection[str] | None, path: str | Path
) -> dict[str, tuple[TensorFile, Tensor]]:
    from weight_cache.tensors.files import tensor_locations

    found = tensor_locations(files)
    _check_names(found, names or (), path)
    wanted = None if names is None else set(names)
    return {name: place for name, place in found.items() if wanted is None or name in wanted}


def _check_names(there: Container[str], names: Collection[str], path: str | Path) -> None:
    from weight_cache.errors import TensorsInvalid

    if absent := sorted(name for name in names if name not in there):
        raise TensorsInvalid(f"{path} does not contain {_few(absent)}")


def _is_cpu(device: str | torch.device) -> bool:
    return str(device).partition(":")[0] == "cpu"


def _tied(state: Mapping[str, torch.Tensor], there: Collection[str]) -> dict[str, str]:
    """Tied parameters: each name → the first of its group's names that the file has."""
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    sources = {
        id_: next((name for name in names if name in there), None) for id_, names in groups.items()
    }
    return {
        name: source
        for id_, names in groups.items()
        for name in names
        if (source := sources[id_]) is not None and name != source
    }


def _move_the_rest(module: torch.nn.Module, loaded: Collection[str], device: Where) -> None:
    """Move tensors that the file does not contain to `device`, if that is a single device."""
    if callable(device):
        return
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name not in loaded and not tensor.is_meta and str(tensor.device) != str(device):
            _set(
                module,
                name,
                type(tensor)(tensor.data.to(device))
                if _is_parameter(tensor)
                else tensor.to(device),
            )


def _is_parameter(tensor: torch.Tensor) -> bool:
    import torch

    return isinstance(tensor, torch.nn.Parameter)


def _get(module: torch.nn.Module, name: str) -> Any:
    owner, _, last = name.rpartition(".")
    return getattr(module.get_submodule(owner), last)


def _set(module: torch.nn.Module, name: str, value: Any) -> None:
    owner, _, last = name.rpartition(".")
    setattr(module.get_submodule(owner), last, value)


def _few(names: Collection[str]) -> str:
    shown = ", ".join(repr(name)[:120] for name in list(names)[:5])
    return f"{shown or 'nothing'}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
