"""Autoscalers under made-up traffic, on a clock that jumps: the world (`world`), its traffic
(`traces`), and who decides (`policies`)."""
