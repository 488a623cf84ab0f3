"""The engine's sleep mode, by its documented HTTP endpoints: what it holds on a GPU is given up
before a snapshot and taken back after it.

Level 1 keeps the weights in DRAM, level 2 drops them, so that they are loaded again from their
files. Waking goes in vLLM's order: memory for the weights, their values, memory for the KV cache
(docs: "Sleep Mode", RLHF weight updates). On a CPU there is no such mode."""

from __future__ import annotations

from pilotlight.worker.engine.client import EngineClient

SLEEP_S = 20.0
"""Level 2 drops what it has, and before a snapshot the node agent waits no longer than 30 s until
all stands still."""
WAKE_S = 120.0
"""To read 80 GB from the page cache, pessimistically."""


def suspend_engine(asker: EngineClient, *, level: int) -> None:
    """Give the GPU's memory up. Raises EngineHung, EngineRefused, OSError."""
    asker.ask("POST", f"/sleep?level={level}", within_s=SLEEP_S)


def resume_engine(asker: EngineClient, *, level: int) -> None:
    """Take it back, weights first. Raises EngineHung, EngineRefused, OSError."""
    asker.ask("POST", "/wake_up?tags=weights", within_s=WAKE_S)
    if level == 2:
        asker.ask("POST", "/collective_rpc", {"method": "reload_weights"}, within_s=WAKE_S)
    asker.ask("POST", "/wake_up?tags=kv_cache", within_s=WAKE_S)
