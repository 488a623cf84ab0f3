"""A credential plugin of kubeconfigs (KEP-541, `client.authentication.k8s.io/v1`): each process of
a platform gets the token of its own service account, although all read one kubeconfig.

`python account_token.py DIRECTORY` prints the token in the file that is named as the account of the
process that asks, or in `others`."""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from pathlib import Path

OTHERS = "others"
MODULES = {"pilotlight.controller": "controller", "activator": "activator"}
"""Module of a process → its account."""


def account_of(arguments: list[str]) -> str:
    """By the arguments of a process: those of `python -m MODULE …`."""
    modules = [after for word, after in pairwise(arguments) if word == "-m"]
    return next((MODULES[name] for name in modules if name in MODULES), OTHERS)


def main() -> None:
    """Print the ExecCredential of the parent process."""
    arguments = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")
    token = (Path(sys.argv[1]) / account_of(arguments)).read_text()
    print(
        json.dumps(
            {
                "apiVersion": "client.authentication.k8s.io/v1",
                "kind": "ExecCredential",
                "status": {"token": token},
            }
        )
    )


if __name__ == "__main__":
    main()
