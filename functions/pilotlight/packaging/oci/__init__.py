"""Reproducible export of container images without a container engine, as OCI image layouts.

Sources: OCI Image Format Specification 1.1 (image-layout.md, manifest.md, config.md, layer.md);
ELF: System V ABI, gabi 4.1, chapters 4 and 5; search path of shared libraries: ld.so(8)."""
