"""Tensors in safetensors files: parsed, mapped in place, or copied to a device. Everything that
knows dtypes or devices is here.

`header`, `files`, `read_plan` and `parallel_read` need the standard library only; `pool` imports
torch when memory is first taken; the others import it."""
