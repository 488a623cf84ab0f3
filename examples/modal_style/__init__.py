"""The typical kinds of files in Modal's style, with only the import changed;
docs/how-to/from-modal.md lists them."""
