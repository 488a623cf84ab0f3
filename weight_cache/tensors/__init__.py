"""Tensors in safetensors files: read, mapped where they lie, or delivered to a device. Whatever names a dtype or a device lives here.

Nothing below this package imports torch before the first tensor is asked for; `header` needs the standard library only.
"""
