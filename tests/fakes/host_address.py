"""An address of this machine, as others on its networks know it."""

from __future__ import annotations

import json
import subprocess


def host_address() -> str:
    """IPv4, and not the loopback's. Needs ip(8)."""
    links = json.loads(
        subprocess.run(["ip", "-4", "-j", "addr"], check=True, capture_output=True).stdout
    )
    addresses = [a["local"] for link in links for a in link["addr_info"] if link["ifname"] != "lo"]
    return str(addresses[0])
