"""Tensors in safetensors files: read, mapped where they lie, or delivered to a device. Whatever
names a dtype or a device lives here.

`header`, `files`, `pieces` and `reading` need the standard library only; `pool` imports torch when
memory is first taken; the others import it."""
