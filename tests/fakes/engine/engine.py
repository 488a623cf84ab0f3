"""A small inference engine with the manners of vLLM: slots, a waiting queue, KV memory in blocks, a
prefix cache, aborts, sleep.

It computes nothing: a token is a word that follows from the prompt, after `token_s` seconds.
Prompts that hold one of these words misbehave: `!crash` (ends the process after three tokens),
`!oom` (takes memory until the kernel ends it), `!hang` (never a token), `!stall` (three tokens,
then nothing), `!error` (an internal error), `!stop` (ends by itself after three tokens)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from tests.fakes.engine.words import Tokenizer, next_token

BLOCK = 16
FAULTY_AFTER = 3


class EngineDead(Exception):
    """Raised for every request of an engine whose core has ended."""


@dataclass(slots=True)
class Counts:
    """What `/metrics` tells; counters only ever grow."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0)
    )
    first_token_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    queue_s: list[float] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One sequence to generate."""

    model: str
    text: str
    tokens: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Said:
    """One token; `finish` is set with the last one."""

    token: int
    text: str
    finish: str | None


def crash() -> None:
    """End this process at once, as a segmentation fault would."""
    os.kill(os.getpid(), signal.SIGKILL)


def take_all_memory() -> None:
    """Take memory until the kernel ends the process."""
    taken = []
    while True:
        taken.append(bytearray(os.urandom(1 << 20)) * 16)


class EngineFake:
    """One engine. Owned by one event loop; all its state changes there.

    Attributes:
        token_s, prefill_s: how long a token takes; how long a prompt takes before the first.
        asleep: 0 awake, else the level.
        wrong: from now on it answers otherwise than before, as a broken restore would.
    """

    def __init__(
        self,
        *,
        model: str = "assistant",
        adapters: tuple[str, ...] = (),
        max_model_len: int = 512,
        max_num_seqs: int = 4,
        kv_tokens: int = 8192,
        token_s: float = 0.0,
        prefill_s: float = 0.0,
        crash: Callable[[], None] | None = None,
        take_all_memory: Callable[[], None] | None = None,
    ) -> None:
        self.model, self.adapters = model, adapters
        self.max_model_len, self.max_num_seqs, self.kv_tokens = (
            max_model_len,
            max_num_seqs,
            kv_tokens,
        )
        self.token_s, self.prefill_s = token_s, prefill_s
        self.tokenizer = Tokenizer()
        self.counts = Counts()
        self.running, self.waiting = 0, 0
        self.held_tokens = 0
        self.asleep, self.wrong, self.dead = 0, False, False
        self.sleeps: list[str] = []
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._changed = asyncio.Condition()
        self._prefixes: set[tuple[int, ...]] = set()
        self._crash = crash or self._die
        self._take_all_memory = take_all_memory or self._die

    def __repr__(self) -> str:
        return (
            f"<EngineFake {self.model} running={self.running} waiting={self.waiting} "
            f"asleep={self.asleep} dead={self.dead}>"
        )

    def names(self) -> tuple[str, ...]:
        """What it answers to: the model, then its adapters."""
        return (self.model, *self.adapters)

    async def wait_idle(self) -> None:
        """Wait until nothing runs and nothing waits."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.running == 0 and self.waiting == 0)

    async def wait_running(self, count: int) -> None:
        """Wait until so many sequences run."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.running >= count)

    def sleep(self, level: int) -> None:
        """Fall asleep; level 2 forgets the prefixes too, as real weights are gone then."""
        self.asleep = level
        self.sleeps.append(f"sleep {level}")
        self._prefixes.clear()

    def wake(self, tags: tuple[str, ...]) -> None:
        """Wake up what is named (`weights`, `kv_cache`), or everything."""
        self.sleeps.append(f"wake {','.join(tags)}".strip())
        if not tags or "kv_cache" in tags:
            self.asleep = 0

    def cached(self, prompt: Prompt) -> int:
        """Tokens of whole blocks that an earlier prompt had, too; remembers this one's."""
        tokens, hits = prompt.tokens, 0
        for end in range(BLOCK, len(tokens), BLOCK):
            if tokens[:end] in self._prefixes:
                hits = end
            self._prefixes.add(tokens[:end])
        self.counts.prefix_queries += len(tokens)
        self.counts.prefix_hits += hits
        return hits

    async def generate(self, prompt: Prompt) -> AsyncGenerator[Said, None]:
        """The tokens, one after another. Closing it aborts the sequence and frees its memory."""
        arrived = time.monotonic()
        finished = "abort"
        await self._enter()
        self.held_tokens += len(prompt.tokens)
        said = 0
        try:
            self._account_start(prompt, arrived)
            await asyncio.sleep(self.prefill_s)
            last = arrived
            async for one in self._speak(prompt):
                now = time.monotonic()
                (self.counts.between_s if said else self.counts.first_token_s).append(now - last)
                said, last = said + 1, now
                self.held_tokens += 1
                self.counts.generation_tokens += 1
                if one.finish is not None:
                    finished = one.finish
                yield one
        except EngineDead:
            finished = "error"
            raise
        finally:
            self.held_tokens -= len(prompt.tokens) + said
            self.counts.finished[finished] += 1
            self.running -= 1
            self._slots.release()
            await self._tell()

    async def _enter(self) -> None:
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _account_start(self, prompt: Prompt, arrived: float) -> None:
        self.counts.prompt_tokens += len(prompt.tokens)
        self.counts.prompts.append(len(prompt.tokens))
        self.counts.queue_s.append(time.monotonic() - arrived)

    async def _speak(self, prompt: Prompt) -> AsyncGenerator[Said, None]:
        if "!error" in prompt.text:
            raise RuntimeError("EngineCore encountered an issue.")
        for index in range(prompt.max_tokens):
            if "!hang" in prompt.text or ("!stall" in prompt.text and index == FAULTY_AFTER):
                await asyncio.Event().wait()
            if index == FAULTY_AFTER and ("!crash" in prompt.text or "!oom" in prompt.text):
                (self._crash if "!crash" in prompt.text else self._take_all_memory)()
            await asyncio.sleep(self.token_s)
            if self.dead:
                raise EngineDead(
                    "EngineCore encountered an issue. See stack trace (above) for the root cause."
                )
            token = next_token(prompt.model, prompt.tokens, index + 1000 * self.wrong)
            stops = "!stop" in prompt.text and not prompt.ignore_eos and index == FAULTY_AFTER - 1
            finish = "stop" if stops else "length" if index == prompt.max_tokens - 1 else None
            yield Said(token, self.tokenizer.decode([token]), finish)
            if stops:
                return

    def _die(self) -> None:
        self.dead = True
