"""The header `Server-Timing` of answers (W3C Server-Timing). Pure."""

from __future__ import annotations


def parse_server_timing(header: str) -> dict[str, float]:
    """Parse `queue;dur=1.2, exec;dur=3` as name → milliseconds. Metrics without
    a duration are omitted."""
    out: dict[str, float] = {}
    for part in header.split(","):
        name, *parameters = (p.strip() for p in part.split(";"))
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            try:
                if key.strip() == "dur" and name:
                    out[name] = float(value.strip().strip('"'))
            except ValueError:
                continue
    return out


def parse_server_timing_descriptions(header: str) -> dict[str, str]:
    """Parse `start;dur=5, weights;desc="dram"` as name → description. Metrics without a description
    are omitted."""
    out = {}
    for part in header.split(","):
        name, *parameters = (p.strip() for p in part.split(";"))
        for key, _, value in (parameter.partition("=") for parameter in parameters):
            if key.strip() == "desc" and name:
                out[name] = value.strip().strip('"')
    return out
