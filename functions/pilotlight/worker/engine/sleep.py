"""The engine's sleep mode, through its documented HTTP endpoints: GPU memory is released before a
snapshot and allocated again after it.

Level 1 keeps the weights in DRAM, level 2 drops them and reloads them from their files. Waking
follows vLLM's order: memory for the weights, their values, memory for the KV cache (docs: "Sleep
Mode", RLHF weight updates). CPU engines have no sleep mode."""

from __future__ import annotations

from pilotlight.worker.engine.client import ServerClient

SLEEP_S = 20.0
"""Level 2 only drops memory; before a snapshot the node agent waits at most 30 s until all
processes are quiesced."""
WAKE_S = 120.0
"""A pessimistic bound for reading 80 GB from the page cache."""


def suspend_engine(asker: ServerClient, *, level: int) -> None:
    """Release the GPU memory. Raises ServerHung, ServerRefused, OSError."""
    asker.ask("POST", f"/sleep?level={level}", within_s=SLEEP_S)


def resume_engine(asker: ServerClient, *, level: int) -> None:
    """Allocate the GPU memory again, weights first. Raises ServerHung, ServerRefused, OSError."""
    asker.ask("POST", "/wake_up?tags=weights", within_s=WAKE_S)
    if level == 2:
        asker.ask("POST", "/collective_rpc", {"method": "reload_weights"}, within_s=WAKE_S)
    asker.ask("POST", "/wake_up?tags=kv_cache", within_s=WAKE_S)
