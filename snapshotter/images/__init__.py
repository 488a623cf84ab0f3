"""Images: environments that are built step by step in a sandbox, their root file systems,
and the bundles of code that are unpacked beside them.

What an image is made of is decided by the SDK; nothing here starts an instance.
"""
