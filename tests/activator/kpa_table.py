"""Knative's autoscaler by its numbers: what its own tests expect, as rows (groups A to F, H and M).

Numbers restated from knative/serving v1.23 (Apache-2.0). Times in seconds, loads in calls at once. Where a field is absent,
the default at the top of its group holds.
"""

from __future__ import annotations

from typing import Any

# fmt: off
# ruff: noqa: E501, ERA001  one case per line reads as a table

DECISION_DEFAULTS: dict[str, Any] = {'max_scale_up_rate': 10.0, 'max_scale_down_rate': 10.0, 'panic_threshold': 2.0, 'stable_window_s': 60.0, 'reachable': True, 'activation_scale': 0, 'scale_down_delay_s': 0.0, 'target_burst_capacity': 0.0}

# name, spec, ready at the start, state before the first tick, state expected at the start, ticks
DECISION: list[tuple[str, dict[str, Any], int, dict[str, Any] | None, dict[str, Any] | None, list[dict[str, Any]]]] = [
    ('A01 metric error -> no decision', {'target': 10, 'target_burst_capacity': 100, 'total': 13.333333333333334}, 1, None, None, [
        {'t': 0, 'ready': 1, 'metric_error': True, 'valid': False},
    ]),
    ('A03 rps metric', {'target': 10, 'target_burst_capacity': 100, 'total': 13.333333333333334}, 1, None, None, [
        {'t': 61, 'ready': 1, 'stable': 100, 'panic': 99, 'desired': 10, 'ebc': -186, 'in_panic': True},
    ]),
    ('A05 stable-mode increase rps', {'target': 10, 'target_burst_capacity': 101, 'total': 13.333333333333334}, 1, None, None, [
        {'t': 0, 'ready': 1, 'stable': 50, 'panic': 50, 'desired': 5, 'ebc': -138},
        {'t': 0, 'ready': 1, 'stable': 100, 'panic': 99, 'desired': 10, 'ebc': -187},
    ]),
    ('A07 panic window extends while still over threshold', {'target': 1, 'target_burst_capacity': 98, 'total': 1.3333333333333333}, 1, None, None, [
        {'t': 0, 'ready': 10, 'stable': 11, 'panic': 25, 'desired': 25, 'ebc': -110, 'panic_time': 0},
        {'t': 30, 'ready': 40, 'stable': 30, 'panic': 80, 'desired': 80, 'ebc': -125, 'panic_time': 30},
    ]),
    ('A09 no traffic -> 0', {'target': 10, 'target_burst_capacity': 75, 'total': 13.333333333333334}, 1, None, None, [
        {'t': 0, 'ready': 1, 'stable': 1, 'panic': 0, 'desired': 1, 'ebc': -62},
        {'t': 0, 'ready': 1, 'stable': 0, 'panic': 0, 'desired': 0, 'ebc': -62},
    ]),
    ('A11 exponential growth tracked in panic', {'target': 1, 'target_burst_capacity': 101, 'total': 1.3333333333333333}, 1, None, None, [
        {'t': 0, 'ready': 1, 'stable': 6, 'panic': 6, 'desired': 6, 'ebc': -106},
        {'t': 0, 'ready': 6, 'stable': 36, 'panic': 36, 'desired': 36, 'ebc': -129, 'panic_time': 0},
        {'t': 1, 'ready': 36, 'stable': 216, 'panic': 216, 'desired': 216, 'ebc': -269, 'panic_time': 1},
        {'t': 1, 'ready': 216, 'stable': 1296, 'panic': 1296, 'desired': 1296, 'ebc': -1109, 'panic_time': 1},
        {'t': 2, 'ready': 1296, 'stable': 1296, 'panic': 1296, 'desired': 1296, 'ebc': 331},
    ]),
    ('A13 unlimited TBC (-1)', {'target': 181, 'target_burst_capacity': -1, 'total': 241.33333333333334}, 1, None, None, [
        {'t': 0, 'ready': 1, 'stable': 21, 'panic': 26, 'desired': 1, 'ebc': -1},
    ]),
    ('A15 no change', {'target': 10, 'target_burst_capacity': 100, 'total': 13.333333333333334}, 1, None, None, [
        {'t': 0, 'ready': 1, 'stable': 50, 'panic': 50, 'desired': 5, 'ebc': -137},
    ]),
    ('A17 panic, stable < panic: panic wins', {'target': 1, 'target_burst_capacity': 100, 'total': 1.3333333333333333}, 1, {'panic_time': -5, 'max_panic_pods': 5}, None, [
        {'t': 0, 'ready': 5, 'stable': 20, 'panic': 30, 'desired': 30, 'ebc': -124},
    ]),
    ('A19 small scale-up rate 1.1 still grows by one', {'max_scale_up_rate': 1.1, 'target': 1, 'target_burst_capacity': 1982, 'total': 1.3333333333333333}, 1, None, None, [
        {'t': 0, 'ready': 2, 'stable': 3, 'panic': 3.1, 'desired': 3, 'ebc': -1983},
    ]),
    ('A21 unreachable ignores scale-down rate', {'max_scale_down_rate': 1.1, 'reachable': False, 'target': 10, 'target_burst_capacity': 1982, 'total': 13.333333333333334}, 1, None, None, [
        {'t': 0, 'ready': 100, 'stable': 1, 'panic': 1, 'desired': 1, 'ebc': -650},
    ]),
    ('A23 panic, hold, un-panic, scale down', {'target': 10, 'target_burst_capacity': 93, 'total': 13.333333333333334}, 1, None, None, [
        {'t': 0, 'ready': 1, 'stable': 100, 'panic': 100, 'desired': 10, 'ebc': -180},
        {'t': 0, 'ready': 10, 'stable': 100, 'panic': 1000, 'desired': 100, 'ebc': -960},
        {'t': 30, 'ready': 10, 'stable': 1, 'panic': 1, 'desired': 100, 'ebc': 39},
        {'t': 61, 'ready': 10, 'stable': 1, 'panic': 1, 'desired': 1, 'ebc': 39},
    ]),
    ('A25 scale-down rate limit /10', {'target': 10, 'target_burst_capacity': 61, 'total': 13.333333333333334}, 1, None, None, [
        {'t': 0, 'ready': 100, 'stable': 1, 'panic': 1, 'desired': 10, 'ebc': 1271},
        {'t': 0, 'ready': 10, 'stable': 1, 'panic': 1, 'desired': 1, 'ebc': 71},
    ]),
    ('A27 zero ready pods counts as one for limits, zero for EBC', {'target': 10, 'target_burst_capacity': 81, 'total': 13.333333333333334}, 1, None, None, [
        {'t': 0, 'ready': 0, 'stable': 1000, 'panic': 888, 'desired': 10, 'ebc': -969},
    ]),
    ('A29 scale-down delay 5m, simple then gradual', {'panic_threshold': 100, 'stable_window_s': 0, 'scale_down_delay_s': 300, 'target': 10, 'total': 0}, 0, None, None, [
        {'t': 2, 'ready': 0, 'stable': 40, 'panic': 40, 'desired': 4},
        {'t': 300, 'ready': 0, 'stable': 0, 'panic': 0, 'desired': 4},
        {'t': 302, 'ready': 0, 'stable': 0, 'panic': 0, 'desired': 0},
        {'t': 540, 'ready': 0, 'stable': 40, 'panic': 40, 'desired': 4},
        {'t': 600, 'ready': 0, 'stable': 30, 'panic': 30, 'desired': 4},
        {'t': 660, 'ready': 0, 'stable': 0, 'panic': 0, 'desired': 4},
        {'t': 840, 'ready': 0, 'stable': 0, 'panic': 0, 'desired': 3},
        {'t': 900, 'ready': 0, 'stable': 0, 'panic': 0, 'desired': 0},
    ]),
    ('A31 scale-down delay 0 acts at once', {'panic_threshold': 100, 'stable_window_s': 0, 'reachable': False, 'target': 10, 'total': 0}, 0, None, None, [
        {'t': 0, 'ready': 0, 'stable': 40, 'panic': 40, 'desired': 4},
        {'t': 0.5, 'ready': 0, 'stable': 20, 'panic': 20, 'desired': 2},
    ]),
    ('A33 starts calm at 1 ready', {'panic_threshold': 220, 'target': 100, 'total': 120, 'target_burst_capacity': 11}, 1, None, {'in_panic': False, 'max_panic_pods': 1}, [
    ]),
]

# name, concurrency limit, target, utilisation, metric, share for concurrency, default concurrency, share for rps, want target, want total
TARGET: list[tuple[str, int, float | None, float | None, str, float, float, float, float, float]] = [
    ('B01 defaults', 0, None, None, 'concurrency', 1.0, 100, 0.7, 100, 100),
    ('B03 default CC 2, TU 30%', 0, None, None, 'concurrency', 0.3, 2, 0.7, 0.6, 2),
    ('B05 CC 10, TU 80%', 10, None, None, 'concurrency', 0.8, 100, 0.7, 8, 10),
    ('B07 CC 1', 1, None, None, 'concurrency', 1.0, 100, 0.7, 1, 1),
    ('B09 target 1', 0, 1, None, 'concurrency', 1.0, 100, 0.7, 1, 1),
    ('B11 target 1, TU 75%', 0, 1, None, 'concurrency', 0.75, 100, 0.7, 0.75, 1),
    ('B13 CC 10 > target 1', 10, 1, None, 'concurrency', 1.0, 100, 0.7, 1, 1),
    ('B15 target 10 > CC 1: CC wins', 1, 10, None, 'concurrency', 1.0, 100, 0.7, 1, 1),
    ('B17 rps target 1', 0, 1, None, 'rps', 1.0, 100, 0.7, 0.7, 1),
    ('B19 rps target 300', 0, 300, None, 'rps', 1.0, 100, 0.7, 210, 300),
]

# stable window, percentage, want panic window
PANIC_WINDOW: list[tuple[float, float, int]] = [(60, 10, 6), (600, 10, 60), (60, 51, 31)]

# name, window, granularity, [(operation, time, value or expected)]
BUCKETS: list[tuple[str, int, int, list[tuple[str, float, float]]]] = [
    ('D01 linear window 5s/1s', 5, 1, [('rec', 0, 1), ('avg', 0, 1), ('rec', 1, 2), ('rec', 2, 3), ('rec', 3, 4), ('rec', 4, 5), ('avg', 4, 3), ('avg', 3.6, 3), ('avg', 6, 4), ('avg', 10, 0), ('rec', 6, 91), ('avg', 6, 20.6), ('rec', 60, 1984), ('avg', 60, 1984), ('rec', 57, 4), ('avg', 60, 497), ('rec', 61, 5), ('avg', 61, 398.6), ('rec', 58, 10), ('avg', 61, 400.6), ('rec', 55, 10), ('avg', 61, 400.6), ('rec', 56, 10), ('avg', 61, 400.6), ('rec', 66, 10), ('avg', 66, 10)]),
    ('D03 hole zeroes the gap', 5, 1, [('rec', 0, 1), ('rec', 1, 2), ('rec', 2, 3), ('rec', 3, 4), ('rec', 4, 5), ('avg', 4, 3), ('rec', 8, 2), ('sum', 8, 7)]),
    ('D05 double counted bucket in one second', 120, 1, [('rec', 0, 1), ('rec', 0.1, 10), ('rec', 1, 1), ('rec', 3, 1), ('sum', 3, 13)]),
]

SMOOTHING: dict[int, float] = {100: 0.2, 60: 0.2, 40: 0.20567, 6: 0.78456, 5: 0.84151}
WEIGHTED: tuple[list[float], float] = ([2, 3, 4, 5, 6], 5.812)

# name, values, indexes, want (window of 5)
MAXIMUM: list[tuple[str, list[int], list[int], list[int]]] = [
    ('E single', [1], [0], [1]),
    ('E descending', [2, 1], [0, 1], [2, 2]),
    ('E windowing out', [5, 6, 5, 5, 5, 5, 5], [0, 1, 2, 3, 4, 5, 6], [5, 6, 6, 6, 6, 6, 5]),
    ('E out 3', [5, 8, 5, 7, 5, 5], [0, 1, 2, 3, 4, 5], [5, 8, 8, 8, 8, 8]),
    ('E out 5', [5, 8, 5, 7, 5, 5, 1, 4, 4, 4], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 8, 8, 8, 8, 8, 7, 7, 5, 5]),
    ('E out 7', [5, 8, 5, 7, 5, 5, 1, 4, 4, 4, 4, 9], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [5, 8, 8, 8, 8, 8, 7, 7, 5, 5, 4, 9]),
    ('E gaps', [6, 5, 2, 1], [0, 1, 2, 6], [6, 6, 6, 2]),
    ('E same index descending', [7, 6, 5, 4, 3, 2, 1], [1, 1, 1, 1, 1, 1, 1], [7, 7, 7, 7, 7, 7, 7]),
]

ZERO_DEFAULTS: dict[str, Any] = {'stable_window_s': 300, 'pa_stable_window_s': 45, 'grace_s': 60, 'progress_deadline_s': 121, 'activation_buffer_s': 30, 'probe_ok': True, 'tbc': 200, 'retention_s': 0, 'enable_scale_to_zero': True}

ZERO: list[dict[str, Any]] = [
    {'id': 'F01 just before idle window', 'start_replicas': 1, 'scale_to': 0, 'want_desired': 1, 'want_applied': False, 'want_requeues': 1, 'want_async_probes': 0, 'state': 'active', 'for_s': 299},
    {'id': 'F03 annotation window passed', 'start_replicas': 1, 'scale_to': 0, 'want_desired': 0, 'want_applied': False, 'want_requeues': 0, 'want_async_probes': 0, 'state': 'active', 'for_s': 300, 'window_s': 45},
    {'id': 'F05 idle passed -> mark inactive, no patch', 'start_replicas': 1, 'scale_to': 0, 'want_desired': 0, 'want_applied': False, 'want_requeues': 0, 'want_async_probes': 0, 'state': 'active', 'for_s': 300},
    {'id': 'F07 idle passed, annotation window', 'start_replicas': 1, 'scale_to': 0, 'want_desired': 0, 'want_applied': False, 'want_requeues': 0, 'want_async_probes': 0, 'state': 'active', 'for_s': 45, 'window_s': 45},
    {'id': 'F09 grace over, retention 120 not', 'start_replicas': 1, 'scale_to': 0, 'want_desired': 0, 'want_applied': False, 'want_requeues': 1, 'want_async_probes': 0, 'state': 'inactive', 'for_s': 60, 'retention_cfg_s': 120},
    {'id': 'F11 grace and retention over', 'start_replicas': 1, 'scale_to': 0, 'want_desired': 0, 'want_applied': True, 'want_requeues': 0, 'want_async_probes': 0, 'state': 'inactive', 'for_s': 60, 'retention_cfg_s': 60},
    {'id': 'F13 just before grace', 'start_replicas': 1, 'scale_to': 0, 'want_desired': 0, 'want_applied': False, 'want_requeues': 1, 'want_async_probes': 0, 'state': 'inactive', 'for_s': 59},
    {'id': 'F15 before grace but proxied 60 s, retention 42 over', 'start_replicas': 1, 'scale_to': 0, 'want_desired': 0, 'want_applied': True, 'want_requeues': 0, 'want_async_probes': 0, 'state': 'inactive', 'for_s': 59, 'proxy_for_s': 60, 'retention_cfg_s': 42},
    {'id': 'F17 TBC -1 skips the probe', 'start_replicas': 1, 'scale_to': 0, 'want_desired': 0, 'want_applied': True, 'want_requeues': 0, 'want_async_probes': 0, 'state': 'inactive', 'for_s': 60, 'tbc': -1, 'probe': 'must-not-be-called'},
    {'id': 'F19 probe says not activator -> async probe', 'start_replicas': 1, 'scale_to': 0, 'want_desired': 0, 'want_applied': False, 'want_requeues': 0, 'want_async_probes': 1, 'state': 'inactive', 'for_s': 60, 'probe': 'false'},
    {'id': 'F21 activating past deadline -> 0', 'start_replicas': 1, 'scale_to': 0, 'want_desired': 0, 'want_applied': True, 'want_requeues': 0, 'want_async_probes': 0, 'state': 'activating', 'for_s': 152},
    {'id': 'F23 to min-scale before grace', 'start_replicas': 10, 'scale_to': 0, 'want_desired': 2, 'want_applied': True, 'want_requeues': 0, 'want_async_probes': 0, 'state': 'inactive', 'for_s': 59, 'min': 2, 'reach': 'Reachable'},
    {'id': 'F25 unreachable ignores retention', 'start_replicas': 1, 'scale_to': 0, 'want_desired': 0, 'want_applied': True, 'want_requeues': 0, 'want_async_probes': 0, 'state': 'inactive', 'for_s': 60, 'retention_cfg_s': 600, 'reach': 'Unreachable'},
    {'id': 'F27 unreachable ignores min-scale', 'start_replicas': 10, 'scale_to': 0, 'want_desired': 0, 'want_applied': True, 'want_requeues': 0, 'want_async_probes': 0, 'state': 'inactive', 'for_s': 60, 'min': 2, 'reach': 'Unreachable'},
    {'id': 'F29 up', 'start_replicas': 1, 'scale_to': 10, 'want_desired': 10, 'want_applied': True, 'want_requeues': 0, 'want_async_probes': 0},
    {'id': 'F31 up from inactive', 'start_replicas': 1, 'scale_to': 10, 'want_desired': 10, 'want_applied': True, 'want_requeues': 0, 'want_async_probes': 0, 'state': 'inactive', 'for_s': 30},
    {'id': 'F33 0 -> 1', 'start_replicas': 0, 'scale_to': 1, 'want_desired': 1, 'want_applied': True, 'want_requeues': 0, 'want_async_probes': 0},
    {'id': 'F35 -1 never scales', 'start_replicas': 12, 'scale_to': -1, 'want_desired': -1, 'want_applied': False, 'want_requeues': 0, 'want_async_probes': 0, 'state': 'active', 'for_s': 0},
    {'id': 'F37 initial scale overrides desired', 'start_replicas': 0, 'scale_to': 1, 'want_desired': 2, 'want_applied': True, 'want_requeues': 0, 'want_async_probes': 0, 'state': 'activating', 'for_s': 0, 'initial': 2},
    {'id': 'F39 initial scale zero', 'start_replicas': 0, 'scale_to': 0, 'want_desired': 0, 'want_applied': False, 'want_requeues': 1, 'want_async_probes': 0, 'state': 'inactive', 'for_s': 0, 'initial': 0, 'allow_zero_initial': True},
    {'id': 'F41 scale-to-zero off -> 1', 'start_replicas': 10, 'scale_to': 0, 'min': 0, 'want_desired': 1, 'want_applied': True, 'enable_scale_to_zero': False, 'state': 'active', 'for_s': 0, 'reach': 'Reachable'},
    {'id': 'F43 off, -1', 'start_replicas': 10, 'scale_to': -1, 'min': 0, 'want_desired': -1, 'want_applied': False, 'enable_scale_to_zero': False, 'state': 'active', 'for_s': 0, 'reach': 'Reachable'},
]

INITIAL_BURST: list[dict[str, Any]] = [
    {'id': 'H1', 'initial_scale': 2, 'total': 25, 'tbc': 42, 'want': 8},
    {'id': 'H3', 'tbc': 0, 'want': 0},
]

ACTIVATORS: list[dict[str, Any]] = [
    {'id': 'G1 default', 'ready': 0, 'total': 100, 'tbc': 200, 'activator_capacity': 100, 'want': 2},
    {'id': 'G3 tbc 0', 'ready': 100, 'total': 100, 'tbc': 0, 'activator_capacity': 100, 'want': 2},
    {'id': 'G5 many', 'ready': 15, 'total': 100, 'tbc': 200, 'activator_capacity': 100, 'want': 17},
]

# wanted, zero allowed, want
INITIAL_SCALE: list[tuple[int | None, bool, int]] = [(None, False, 1), (0, True, 0)]
