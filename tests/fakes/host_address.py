"""An address of this machine, as others on its networks know it."""

from __future__ import annotations

import json
import subprocess

import pytest


def host_address() -> str:
    """IPv4, and neither the loopback's nor a slot's. Needs ip(8). Skips the test if there is
    none."""
    links = json.loads(
        subprocess.run(["ip", "-4", "-j", "addr"], check=True, capture_output=True).stdout
    )
    for link in links:
        if link["ifname"] != "lo" and not link["ifname"].startswith("pl"):
            for address in link["addr_info"]:
                return str(address["local"])
    pytest.skip("this machine has no address but its loopback's")
