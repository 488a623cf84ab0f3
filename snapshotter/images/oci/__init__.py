"""Container images of functions: pulled by digest from their registry, unpacked for workers."""
