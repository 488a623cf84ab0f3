"""Images without an engine that builds them: an OCI image layout, written file by file, the same
bytes every time.

Sources: OCI Image Format Specification 1.1 (image-layout.md, manifest.md, config.md, layer.md);
ELF: System V ABI, gabi 4.1, chapters 4 and 5; where shared libraries are looked for: ld.so(8)."""
