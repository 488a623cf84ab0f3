"""Builds transformers models from mapped or delivered tensors.

transformers gets the tensors instead of a path (`from_pretrained(None, config=…, state_dict=…)`):
it builds the model without memory, renames, converts and ties tensors by its own rules, computes
those that no file contains (rotary frequencies, position indices) and assigns the rest. Tensors
that need no conversion remain views of the mapped file. For a GPU those views are then replaced by
tensors delivered to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Load = Callable[..., Mapping[str, "torch.Tensor"]]
_FOR_THE_MODEL = (
    *(
        "dtype",
        "torch_dtype",
        "attn_implementation",
        "experts_implementation",
        "key_mapping",
        "ignore_mismatched_sizes",
    ),
    *("output_loading_info", "generation_config"),
)
"""Keywords of the model; all others are passed to the configuration first, as in transformers."""


def from_pretrained(
    auto_class: Any, path: Path, *, load: Load, device: str | torch.device, **kwargs: Any
) -> Any:
    """Build a transformers model (`pilotlight.weights.from_pretrained`). `load`:
    `pilotlight.weights.load`."""
    import torch

    if "device_map" in kwargs:
        raise ValueError(
            "device_map: name one device with device=, or use transformers' own from_pretrained"
        )
    kept = {key: kwargs.pop(key) for key in _FOR_THE_MODEL if key in kwargs}
    quantized = "quantization_config" in kwargs
    config, kwargs = _configuration(auto_class, path, kwargs)
    # quantization libraries place tensors by themselves
    if quantized or getattr(config, "quantization_config", None) is not None:
        return auto_class.from_pretrained(
            path, config=config, device_map={"": str(device)}, **kept, **kwargs
        )
    model_class, config = _model_class(auto_class, config, kwargs)
    tensors = load(path)
    if model_class.can_generate() and (path / "generation_config.json").is_file():
        from transformers import GenerationConfig

        kept.setdefault("generation_config", GenerationConfig.from_pretrained(path))
    answer = model_class.from_pretrained(None, config=config, state_dict=tensors, **kept, **kwargs)
    model = answer[0] if isinstance(answer, tuple) else answer
    model.name_or_path = model.config.name_or_path = str(path)
    if torch.device(device).type != "cpu":
        _move(model, tensors, partial(load, path, device=device), device)
    return answer


def _configuration(
    auto_class: Any, path: Path, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The configuration, with its own keywords applied, and the remaining keywords."""
    from transformers import AutoConfig, PreTrainedConfig

    given = kwargs.pop("config", None)
    if isinstance(given, PreTrainedConfig):
        return given, kwargs
    source = getattr(auto_class, "config_class", None) or AutoConfig
    config, rest = source.from_pretrained(given or path, return_unused_kwargs=True, **kwargs)
    return config, rest


def _model_class(auto_class: Any, config: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The class that `auto_class` chooses, and its configuration, which for some classes is only a
    part of the whole."""
    import torch

    if not hasattr(auto_class, "from_config"):
        return auto_class, config
    trust = {key: kwargs[key] for key in ("trust_remote_code", "code_revision") if key in kwargs}
    with torch.device("meta"):  # no memory
        skeleton = auto_class.from_config(config, **trust)
    return type(skeleton), config if type(skeleton.config) is type(config) else skeleton.config


def _move(
    model: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    load: Load,
    device: str | torch.device,
) -> None:
    """Move the model to `device`: views of the file are read by `load` from disk through the pool;
    computed or converted tensors are copied.

    The parameter objects are kept, so that tied parameters remain tied.
    """
    import torch

    held = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    origin = {_place(tensor): name for name, tensor in tensors.items() if tensor.numel()}
    names = {
        id_: origin[_place(tensor)] for id_, tensor in held.items() if _place(tensor) in origin
    }
    delivered = load(names=set(names.values()))
    for module in model.modules():
        for name, tensor in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            moved = delivered[names[id(tensor)]] if id(tensor) in names else tensor.data.to(device)
            if isinstance(tensor, torch.nn.Parameter):
                tensor.data = moved
            else:
                setattr(module, name, moved)


def _place(tensor: torch.Tensor) -> tuple[int, torch.dtype, torch.Size, tuple[int, ...]]:
    """Key that identifies a view of a file."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
