"""Which instance of a language model should a prompt go to? Six simulated engines under prompts
that begin alike, and that do not.

Four ways to choose are compared: at random, the least loaded, by the prompt's beginning without a
bound, and ours (by its beginning, with loads bounded). The code that chooses is the activator's own
(`activator.llm.prefix_affinity`); only the engines and their callers are made up.

An engine here has slots, reads prompts one after another at a fixed pace, skips what its prefix
cache holds (blocks of 16 tokens, least recently used go first) and writes each answer at a fixed
pace of its own. Calls that find no slot wait, first come, first served. Times are simulated, so
they do not depend on the machine; absolute numbers mean nothing, the differences between rows do.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from activator.llm.prefix_affinity import LOAD, by_key, key_of, of_two
from benchmarks.harness import Report, Row, options, percentile, phase

INSTANCES = 6
SLOTS = 16
BLOCK_TOKENS = 16
CACHE_BLOCKS = 4000
"""64 thousand tokens: what some ten full prompts of one engine take besides."""
READ_TOKENS_PER_S = 8000.0
WRITE_TOKEN_S = 0.02
CALLS, QUICK_CALLS = 8000, 1500
"""Of one run."""
SEEDS = (7, 8, 9, 10, 11)
"""Runs that are put together: where chats come in bursts, one run's 99th percentile says more of
the burst than of who chose."""
CHARS_PER_TOKEN = 4
NEVER_FULL = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request: its blocks by name (equal beginnings have equal names), its whole length, and
    what its caller sends.

    `think`: how long its caller thinks before the next turn, against the average.
    """

    blocks: tuple[int, ...]
    tokens: int
    answer_tokens: int
    body: Mapping[str, Any]
    think: float = 0.0
    next_turn: Callable[[], Prompt] | None = None


@dataclass(eq=False, slots=True)
class Engine:
    """One simulated instance; an `affinity.Place`."""

    id: str
    capacity: int = SLOTS
    in_flight: int = 0
    read_until: float = 0.0
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def has_slot(self, now: float) -> bool:
        """Whether one more call may go in."""
        return self.in_flight < self.capacity

    def read(self, prompt: Prompt, now: float) -> tuple[float, int]:
        """When its first token is there, and how many of its tokens were in the cache."""
        found = 0
        for block in prompt.blocks:
            if block not in self.cache:
                break
            found += 1
        for block in prompt.blocks:
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > CACHE_BLOCKS:
            self.cache.popitem(last=False)
        cached = found * BLOCK_TOKENS
        self.read_until = max(now, self.read_until) + (prompt.tokens - cached) / READ_TOKENS_PER_S
        return self.read_until + WRITE_TOKEN_S, cached


Choose = Callable[[Prompt, Sequence[Engine]], Engine | None]


def at_random(_: Prompt, engines: Sequence[Engine], *, chance: random.Random) -> Engine | None:
    """Any with a free slot."""
    free = [engine for engine in engines if engine.has_slot(0.0)]
    return chance.choice(free) if free else None


def least_loaded(_: Prompt, engines: Sequence[Engine], *, chance: random.Random) -> Engine | None:
    """The one with the fewest calls."""
    free = [engine for engine in engines if engine.has_slot(0.0)]
    return min(free, key=lambda engine: (engine.in_flight, chance.random()), default=None)


def by_beginning(
    prompt: Prompt, engines: Sequence[Engine], *, chance: random.Random, load: float
) -> Engine | None:
    """As `EngineThrottler` does."""
    key = key_of(prompt.body)
    chosen = by_key(key, engines, 0.0, load=load) if key is not None else None
    return chosen or of_two(engines, 0.0, chance)


def ways(chance: random.Random) -> dict[str, Choose]:
    """What is compared."""
    return {
        "random": partial(at_random, chance=chance),
        "least loaded": partial(least_loaded, chance=chance),
        "beginning, no bound": partial(by_beginning, chance=chance, load=NEVER_FULL),
        "ours": partial(by_beginning, chance=chance, load=LOAD),
    }


# -- who calls -------------------------------------------------------------------------------------
class Callers:
    """Makes prompts; each chat draws from a source of its own, so that all ways to choose have the
    same chats. Owner: one simulation."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._names = itertools.count(1)

    def blocks(self, tokens: int) -> tuple[int, ...]:
        """Blocks that nobody else has."""
        return tuple(itertools.islice(self._names, tokens // BLOCK_TOKENS))

    def system(self, name: int, tokens: int) -> tuple[tuple[int, ...], str]:
        """A system prompt: its blocks and its words."""
        return self.blocks(tokens), f"prompt {name} " * (tokens * CHARS_PER_TOKEN // 10)

    def shared(self, systems: int, tokens: int) -> Iterator[Prompt]:
        """Single questions under one of so many system prompts, the n-th of which is asked for 1/n
        as often as the first."""
        known = [self.system(n, tokens) for n in range(systems)]
        weights = [1 / (n + 1) for n in range(systems)]
        while True:
            blocks, words = self.rng.choices(known, weights)[0]
            yield self.turn(
                self.one(), blocks, tokens, [{"role": "system", "content": words}], turns=1
            )

    def chats(self, tokens: int, turns: int) -> Iterator[Prompt]:
        """Chats of some turns under one short system prompt, each turn with all that was said
        before."""
        blocks, words = self.system(0, tokens)
        while True:
            chat = self.one()
            yield self.turn(
                chat,
                blocks,
                tokens,
                [{"role": "system", "content": words}],
                turns=chat.randint(2, turns),
            )

    def strangers(self, tokens: int) -> Iterator[Prompt]:
        """Prompts that have nothing in common."""
        while True:
            yield self.turn(self.one(), (), 0, [], turns=1, question_tokens=tokens)

    def one(self) -> random.Random:
        """Who draws for a chat."""
        return random.Random(self.rng.getrandbits(64))

    def turn(
        self,
        chat: random.Random,
        blocks: tuple[int, ...],
        tokens: int,
        messages: list[dict[str, str]],
        *,
        turns: int,
        question_tokens: int = 160,
    ) -> Prompt:
        """The next question of a chat that has `turns` left, this one included. Most answers are
        short, some are very long."""
        words = f"question {chat.getrandbits(64)} " * (question_tokens * CHARS_PER_TOKEN // 30)
        own, answer = self.blocks(question_tokens), max(1, int(chat.lognormvariate(4.4, 0.8)))
        said = [*messages, {"role": "user", "content": words}]
        after = [*said, {"role": "assistant", "content": "answer"}]
        heard = self.blocks(answer)
        following = partial(
            self.turn,
            chat,
            blocks + own + heard,
            tokens + question_tokens + answer,
            after,
            turns=turns - 1,
        )
        return Prompt(
            blocks=blocks + own,
            tokens=tokens + question_tokens,
            answer_tokens=answer,
            body={"messages": said},
            think=chat.expovariate(1.0),
            next_turn=following if turns > 1 else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A kind of callers: who makes the prompts, how many begin in a second, and how long they think
    between turns."""

    prompts: Callable[[Callers], Iterator[Prompt]]
    begin_per_s: float
    think_s: float = 5.0


LOADS = {
    "40 system prompts": Load(prompts=lambda callers: callers.shared(40, 1536), begin_per_s=30.0),
    "chats of 2-8 turns": Load(prompts=lambda callers: callers.chats(256, 8), begin_per_s=7.0),
    "one system prompt": Load(prompts=lambda callers: callers.shared(1, 1536), begin_per_s=35.0),
    "nothing in common": Load(prompts=lambda callers: callers.strangers(768), begin_per_s=35.0),
}


# -- the simulation --------------------------------------------------------------------------------
@dataclass(slots=True)
class Outcome:
    """Milliseconds to first tokens, prompt tokens and those of them that were in a cache, and the
    busiest instance of each run by its calls against the average."""

    first_token_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    cached: int = 0
    busiest: list[float] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Another run."""
        self.first_token_ms += other.first_token_ms
        self.tokens += other.tokens
        self.cached += other.cached
        self.busiest += other.busiest

    @property
    def hit_rate(self) -> float:
        """Of the prompt tokens."""
        return self.cached / self.tokens if self.tokens else 0.0


def simulate(load: Load, choose: Choose, *, calls: int, seed: int) -> Outcome:
    """So many calls; the same seed gives every way to choose the same callers."""
    rng = random.Random(seed)
    callers = Callers(random.Random(rng.random()))
    fresh = load.prompts(callers)
    engines = [Engine(f"i-{n}") for n in range(INSTANCES)]
    outcome, taken = Outcome(), Counter[str]()
    order = itertools.count()
    events: list[tuple[float, int, Prompt | None, Engine | None]] = [(0.0, next(order), None, None)]
    waiting: deque[tuple[float, Prompt]] = deque()
    came = 0
    while events:
        now, _, prompt, engine = heapq.heappop(events)
        if engine is not None:
            engine.in_flight -= 1
        elif prompt is not None:
            waiting.append((now, prompt))
        elif came < calls:
            came += 1
            waiting.append((now, next(fresh)))
            heapq.heappush(
                events, (now + rng.expovariate(load.begin_per_s), next(order), None, None)
            )
        while waiting and (chosen := choose(waiting[0][1], engines)) is not None:
            since, asked = waiting.popleft()
            chosen.in_flight += 1
            first_at, cached = chosen.read(asked, now)
            ends_at = first_at + asked.answer_tokens * WRITE_TOKEN_S
            outcome.first_token_ms.append((first_at - since) * 1000)
            outcome.tokens += asked.tokens
            outcome.cached += cached
            taken[chosen.id] += 1
            heapq.heappush(events, (ends_at, next(order), None, chosen))
            if asked.next_turn is not None and came < calls:
                came += 1
                heapq.heappush(
                    events,
                    (ends_at + asked.think * load.think_s, next(order), asked.next_turn(), None),
                )
    outcome.busiest.append(max(taken.values()) * INSTANCES / taken.total())
    return outcome


def compare(load: Load, *, calls: int, seeds: Sequence[int] = SEEDS) -> dict[str, Outcome]:
    """All ways to choose, for the same callers, all runs together."""
    found = {way: Outcome() for way in ways(random.Random())}
    for seed in seeds:
        for way, choose in ways(random.Random(seed)).items():
            found[way].add(simulate(load, choose, calls=calls, seed=seed))
    return found


def add(report: Report, *, calls: int) -> None:
    """Simulate every load with every way to choose, and say where ours is not the best."""
    for name, load in LOADS.items():
        with phase(name):
            found = compare(load, calls=calls)
        for way, outcome in found.items():
            busiest = statistics.fmean(outcome.busiest)
            note = (
                f"{outcome.hit_rate:.0%} of the prompt tokens in memory, busiest instance "
                f"{busiest:.2f} x the average"
            )
            report.rows.append(
                Row.of(f"{name}: {way}", "ms to first token", outcome.first_token_ms, note)
            )
        p99 = {way: percentile(outcome.first_token_ms, 99) for way, outcome in found.items()}
        report.ratios[f"{name}: p99 of least loaded over ours"] = p99["least loaded"] / p99["ours"]
        report.ratios[f"{name}: hits of ours over least loaded"] = found["ours"].hit_rate / max(
            0.001, found["least loaded"].hit_rate
        )
        better = [way for way in found if p99[way] < p99["ours"]]
        if better:
            told = ", ".join(f"{way} {p99[way]:.0f} ms" for way in better)
            report.remarks.append(
                f"{name}: we lose on p99 to first token: ours {p99['ours']:.0f} ms, {told}"
            )


def main() -> None:
    """Run it; print the table."""
    asked = options(__doc__.partition("\n")[0])
    report = Report(
        f"prompts to {INSTANCES} simulated engines of {SLOTS} slots, loads bounded at {LOAD} x "
        f"the average"
    )
    add(report, calls=QUICK_CALLS if asked.quick else CALLS)
    report.finish(asked)


if __name__ == "__main__":
    main()
