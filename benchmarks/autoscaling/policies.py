"""Who decides: pilotlight's decider, Knative's KPA with its defaults, and a fixed keep-alive.

`Pilotlight` feeds the platform's own `decide`, `starts_for_burst`, `is_start_needed`, windows and
pauses just as `autoscaler.revision_scaler.RevisionScaler` and `balancing.throttler.Throttler` of
the activator do.
`Kpa` is `activator.autoscaler.kpa.step` (held to Knative's own cases, number for number) with what
is around it there: ticks of 2 s, a request_scale_up from zero, `knative_bounds.bound` on the way to zero,
starting instances invisible. Both get what flatters them: one queue for all calls, no network, no
lost second between a decision and its start."""

from __future__ import annotations

import math
from dataclasses import dataclass

from activator.autoscaler import kpa
from activator.autoscaler.decider import decide, initial_state
from activator.autoscaler.idle_histogram import IdleHistogram
from activator.autoscaler.kpa import panic_window_s
from activator.autoscaler.observation import RevisionObservation
from activator.autoscaler.scale_down import Candidate, choose_victims
from activator.autoscaler.scaling_decision import DeciderSpec
from activator.autoscaler.windows import TimeWindow
from activator.balancing.start_estimates import (
    StartTimeEstimator,
    is_start_needed,
    starts_for_burst,
)
from activator.balancing.wait_queue import ConcurrencyMeter
from benchmarks.autoscaling.knative_bounds import Activity, BoundsSpec, RevisionStatus, bound
from benchmarks.autoscaling.world import Pod, Scaled
from pilotlight.spec.instances.scaling import Scaling
from snapshotter.types import StartKind

TICK_S = 2.0
"""Between decisions, in Knative and here."""
PANIC_PERCENT = 10.0
FORGET_S = 30.0
"""As `activator.autoscaler.autoscaler_loop`: a revision at zero loses its windows after this
long."""
MOVE_TO_ZERO_S = 3.0


class KeepAlive:
    """A start for every call that nothing covers; an instance goes after `window_s` without a
    call."""

    def __init__(self, scaled: Scaled, *, window_s: float = 60.0) -> None:
        self._scaled = scaled
        self._window_s = window_s

    def arrived(self) -> None:
        """Start what waits."""
        own = self._scaled
        each = own.function.max_inputs
        wanted = starts_for_burst(
            waiting=len(own.line),
            free_slots=own.free_slots,
            starting_slots=own.starting * each,
            max_inputs=each,
            instances=len(own.pods),
            max_instances=own.function.max_instances,
        )
        own.start(wanted)

    def ended(self) -> None:
        """Look again when the window is over."""
        for pod in self._scaled.live():
            if not pod.in_flight and pod.idle_since == self._scaled.world.now:
                self._look_later(pod)
        self.arrived()

    def came(self, pod: Pod) -> None:
        """It may have come in vain."""
        if not pod.in_flight:
            self._look_later(pod)

    def is_start_needed(self) -> bool:
        """Every start is made that was asked for."""
        return True

    def _look_later(self, pod: Pod) -> None:
        idle_since, world = pod.idle_since, self._scaled.world

        def look() -> None:
            if (
                not pod.is_gone
                and not pod.is_draining
                and not pod.in_flight
                and pod.idle_since == idle_since
            ):
                self._scaled.end(pod)

        world.at(world.now + self._window_s, look)


class HybridHistogram(KeepAlive):
    """The policy of Shahrad et al., "Serverless in the Wild" (ATC 2020), section 4: of the idle times
    of a function, in bins of a minute, the 5th percentile says when to load it ahead of the next
    call, and the 99th how long to keep it, each with a margin of a tenth. A histogram that is not
    representative (fewer than ten idle times, bins that hardly differ, too many idle times beyond
    its range) keeps an instance for its whole range. Without their ARIMA model, which is for
    functions that are called less than each four hours."""

    RANGE_MIN = 240
    MARGIN = 0.1
    FEWEST, LEAST_CV, MOST_BEYOND = 10, 2.0, 0.5

    def __init__(self, scaled: Scaled) -> None:
        super().__init__(scaled, window_s=self.RANGE_MIN * 60.0)
        self._bins = [0] * self.RANGE_MIN
        self._beyond = 0
        self._idle_since: float | None = None

    def arrived(self) -> None:
        """An idle time ends."""
        if self._idle_since is not None:
            minute = int((self._scaled.world.now - self._idle_since) // 60)
            if minute < self.RANGE_MIN:
                self._bins[minute] += 1
            else:
                self._beyond += 1
            self._idle_since = None
        super().arrived()

    def ended(self) -> None:
        """One begins with the last call: unload, and load again before the next."""
        own, now = self._scaled, self._scaled.world.now
        if own.in_flight or own.line:
            super().ended()
            return
        self._idle_since = now
        prewarm_s, keep_s = self.windows()
        self._window_s = keep_s
        if not prewarm_s:
            super().ended()
            return
        for pod in list(own.live()):
            own.end(pod)

        def load() -> None:
            if self._idle_since == now and not own.pods:
                own.start(1)

        own.world.at(now + prewarm_s, load)

    def windows(self) -> tuple[float, float]:
        """Seconds until it is loaded ahead (0 = it stays), and seconds that it is kept from then."""
        known = sum(self._bins)
        mean = known / self.RANGE_MIN
        spread = math.sqrt(sum((count - mean) ** 2 for count in self._bins) / self.RANGE_MIN)
        if (
            known < self.FEWEST
            or spread < self.LEAST_CV * mean
            or self._beyond > self.MOST_BEYOND * (known + self._beyond)
        ):
            return 0.0, self.RANGE_MIN * 60.0
        head_s = 60.0 * self._minute_of(0.05 * known)
        tail_s = 60.0 * (self._minute_of(0.99 * known) + 1)
        prewarm_s = head_s * (1 - self.MARGIN)
        return prewarm_s, tail_s * (1 + self.MARGIN) - prewarm_s

    def _minute_of(self, rank: float) -> int:
        below = 0
        for minute, count in enumerate(self._bins):
            below += count
            if below >= rank:
                return minute
        return self.RANGE_MIN - 1


class Pilotlight:
    """The platform's own decisions, for a function that says what `scaling` says."""

    def __init__(self, scaled: Scaled, scaling: Scaling) -> None:
        self._scaled = scaled
        self._spec = DeciderSpec.from_scaling(scaling)
        self._load = ConcurrencyMeter(scaled.world.now)
        self._starts = StartTimeEstimator()
        self._gaps = IdleHistogram()
        self._is_awake = False
        self._looks_again = False
        self._ticks = 0

    def _wake(self, now: float) -> None:
        """As a `RevisionScaler` is made: windows and the decider's memory begin anew."""
        self._is_awake = True
        self._stable = TimeWindow(self._spec.kpa.stable_window_s)
        self._panic = TimeWindow(panic_window_s(self._spec.kpa.stable_window_s, PANIC_PERCENT))
        self._state = initial_state(now, spec=self._spec, ready=0)
        self._recorded_at = now
        self._ticks = 0
        self._scaled.world.at(math.floor(now) + 1.0, self._tick)

    def arrived(self) -> None:
        """A call that waits pokes."""
        now = self._scaled.world.now
        self._load.add(now)
        if not self._is_awake:
            self._wake(now)
        self._poke()

    def ended(self) -> None:
        """Its slot went to whoever waits."""
        self._load.remove(self._scaled.world.now)

    def came(self, pod: Pod) -> None:
        """Remember what its start took."""
        assert pod.held_at is not None
        assert pod.ready_at is not None
        self._starts.observe(StartKind.COLD, pod.ready_at - pod.held_at, ())

    def is_start_needed(self) -> bool:
        """As `Throttler.is_needed`."""
        own = self._scaled
        each = own.function.max_inputs
        return is_start_needed(
            waiting=len(own.line),
            starting_slots=(own.starting - 1) * each,
            running_slots=own.ready * each,
            oldest_wait_s=own.world.now - own.line[0][0] if own.line else 0.0,
            start_s=self._starts.expected_s(),
            call_s=self._call_s(),
        )

    def _poke(self) -> None:
        own, start_s = self._scaled, self._starts.expected_s()
        wanted = self._required_starts(start_s, self._call_s())
        own.start(wanted)
        if start_s is not None and not self._looks_again and wanted < self._required_starts():
            self._looks_again = True
            own.world.at(own.world.now + start_s, lambda: self._recheck_starts(start_s))

    def _recheck_starts(self, start_s: float) -> None:
        """As `Throttler._recheck_starts`."""
        self._looks_again = False
        own = self._scaled
        if own.line and own.world.now - own.line[0][0] >= start_s:
            own.start(self._required_starts())
        elif own.line:
            self._poke()

    def _required_starts(self, start_s: float | None = None, call_s: float | None = None) -> int:
        own = self._scaled
        each = own.function.max_inputs
        return starts_for_burst(
            waiting=len(own.line),
            free_slots=own.free_slots,
            starting_slots=own.starting * each,
            max_inputs=each,
            instances=len(own.pods),
            max_instances=own.function.max_instances,
            running_slots=own.ready * each,
            start_s=start_s,
            call_s=call_s,
        )

    def _call_s(self) -> float | None:
        """Mean time of the calls that its instances have had so far."""
        pods = self._scaled.pods.values()
        calls = sum(pod.calls for pod in pods)
        return sum(pod.held_s for pod in pods) / calls if calls else None

    def _tick(self) -> None:
        own, now = self._scaled, self._scaled.world.now
        load = self._load.consume_average(now, now - self._recorded_at)
        self._recorded_at = now
        self._stable.record(now, load)
        self._panic.record(now, load)
        self._gaps.record(
            now, min(own.ready, math.ceil(self._load.consume_peak() / own.function.max_inputs))
        )
        self._ticks += 1
        if self._ticks % 2 == 0:
            self._decide(now)
        if not own.pods and not own.line and now - self._load.last_call_at >= FORGET_S:
            self._is_awake = False
            return
        own.world.at(now + 1.0, self._tick)

    def _decide(self, now: float) -> None:
        own = self._scaled
        live = list(own.live())
        observed = RevisionObservation(
            stable=None if self._stable.is_empty(now) else self._stable.average(now),
            panic=None if self._panic.is_empty(now) else self._panic.average(now),
            ready=len(live),
            starting=own.starting,
            in_flight=own.in_flight,
            waiting=len(own.line),
            idle_s=tuple(now - pod.idle_since for pod in live if not pod.in_flight),
            oldest_wait_s=now - own.line[0][0] if own.line else 0.0,
            start_s=self._starts.expected_s(),
            call_s=self._call_s(),
            kept=self._kept(now),
            is_crowded=bool(own.world.waiting),
        )
        decision, self._state = decide(now, observed, self._spec, self._state)
        if decision.starts:
            own.start(min(decision.starts, own.function.max_instances - len(own.pods)))
        if decision.stops:
            candidates = [
                Candidate(
                    id=pod.id,
                    in_flight=pod.in_flight,
                    idle_s=0.0 if pod.in_flight else now - pod.idle_since,
                )
                for pod in live
            ]
            for victim in choose_victims(candidates, decision.stops):
                own.end(own.pods[victim])

    def _kept(self, now: float) -> int | None:
        start_s = self._starts.expected_s()
        if self._spec.keep is None or start_s is None:
            return None
        return self._gaps.kept(
            now,
            instances=self._scaled.ready,
            start_s=start_s,
            terms=self._spec.keep,
            is_crowded=bool(self._scaled.world.waiting),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KpaTerms:
    """Settings of the KPA arm: Knative's defaults."""

    utilisation: float = 0.7
    stable_window_s: float = 60.0


class Kpa:
    """Knative's decision, as its autoscaler and its reconciler take it."""

    def __init__(self, scaled: Scaled, terms: KpaTerms) -> None:
        own = scaled.function
        self._scaled = scaled
        self._spec = kpa.KpaSpec(
            target=max(0.01, own.max_inputs * terms.utilisation),
            total=float(own.max_inputs),
            stable_window_s=terms.stable_window_s,
        )
        self._bounds = BoundsSpec(
            max_instances=own.max_instances, stable_window_s=terms.stable_window_s
        )
        self._load = ConcurrencyMeter(scaled.world.now)
        self._stable = TimeWindow(terms.stable_window_s)
        self._panic = TimeWindow(panic_window_s(terms.stable_window_s, PANIC_PERCENT))
        self._state = kpa.initial_state(0.0, spec=self._spec, ready=0)
        self._recorded_at = 0.0
        self._proxied_since: float | None = 0.0
        self._activity, self._since = Activity.INACTIVE, 0.0
        self._is_awake = False
        self._wanted = 0
        self._looks = 0

    def arrived(self) -> None:
        """A call at zero pokes: a first report of one call, decided upon at once."""
        now = self._scaled.world.now
        self._load.add(now)
        if self._wanted == 0:
            self._report(now, 1.0)
            self._decide(now)
        if not self._is_awake:
            self._is_awake = True
            self._recorded_at = now
            self._scaled.world.at(math.floor(now) + 1.0, self._tick)

    def ended(self) -> None:
        """Seen at the next tick."""
        self._load.remove(self._scaled.world.now)

    def came(self, pod: Pod) -> None:
        """Ready: the revision is active."""
        if self._activity is Activity.ACTIVATING:
            self._enter(Activity.ACTIVE)

    def is_start_needed(self) -> bool:
        """Every start is made that was asked for."""
        return True

    def _report(self, now: float, load: float) -> None:
        self._stable.record(now, load)
        self._panic.record(now, load)

    def _tick(self) -> None:
        own, now = self._scaled, self._scaled.world.now
        self._report(now, self._load.consume_average(now, now - self._recorded_at))
        self._recorded_at = now
        if int(now) % 2 == 0:
            self._decide(now)
        if not own.pods and not own.line and self._wanted == 0:
            self._is_awake = False
            return
        own.world.at(now + 1.0, self._tick)

    def _decide(self, now: float) -> None:
        load = kpa.KpaLoad(
            stable=self._stable.average(now),
            panic=self._panic.average(now),
            ready=self._scaled.ready,
        )
        decision, self._state = kpa.step(now, load, self._spec, self._state)
        self._wanted = decision.desired
        if decision.desired > 0 and decision.excess_burst_capacity >= 0:
            self._proxied_since = None
        elif self._proxied_since is None:
            self._proxied_since = now
        if self._wanted > 0 and self._activity is Activity.INACTIVE:
            self._enter(Activity.ACTIVE if self._scaled.ready else Activity.ACTIVATING)
        self._reconcile()

    def _enter(self, activity: Activity) -> None:
        self._activity, self._since = activity, self._scaled.world.now

    def _reconcile(self) -> None:
        """Knative's scaler: floor, ceiling, and the steps on the way to zero."""
        own, now = self._scaled, self._scaled.world.now
        scale = sum(1 for pod in own.pods.values() if not pod.is_draining)
        standing = RevisionStatus(
            instances=scale,
            activity=self._activity,
            for_s=now - self._since,
            is_probe_ok=self._proxied_since is not None,
            proxied_s=None if self._proxied_since is None else now - self._proxied_since,
        )
        bounded = bound(self._wanted, spec=self._bounds, standing=standing)
        if bounded.is_applied:
            self._scale_to(bounded.desired, scale)
        if (
            self._wanted == 0
            and self._activity is Activity.ACTIVE
            and standing.for_s >= self._bounds.stable_window_s
        ):
            self._enter(Activity.INACTIVE)
            if self._proxied_since is None:
                self._proxied_since = now
            self._look_later(MOVE_TO_ZERO_S)
        elif bounded.look_again_s is not None and self._wanted == 0:
            self._look_later(bounded.look_again_s)

    def _look_later(self, after_s: float) -> None:
        self._looks += 1
        own = self._looks

        def look() -> None:
            if own == self._looks and self._wanted == 0:
                self._reconcile()

        self._scaled.world.at(self._scaled.world.now + after_s, look)

    def _scale_to(self, desired: int, scale: int) -> None:
        """More, or fewer: a ReplicaSet ends those that are not ready first, then the youngest,
        whatever they do."""
        own = self._scaled
        if desired > scale:
            own.start(desired - scale)
            return
        kept = [pod for pod in own.pods.values() if not pod.is_draining]
        kept.sort(key=lambda pod: (pod.ready_at is not None, -(pod.ready_at or 0.0), -pod.asked_at))
        for pod in kept[: scale - desired]:
            own.end(pod)
