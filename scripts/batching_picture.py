"""Draws docs/img/batching.svg: calls that the worker's own gathering put into batches, on a clock
that jumps.

`python -m scripts.batching_picture` from the root of the repository, after rules or drawing
changed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pilotlight.spec.policies import BatchPolicy
from pilotlight.worker.batching.batcher import Batcher
from pilotlight.worker.process.call_threads import CallThreads
from pilotlight.worker.user_code.arguments import Binder
from pilotlight.worker.user_code.spans import CallSpans
from pilotlight.worker.user_code.target import Method, Style
from tests.snapshotter.cuda import virtual_time

PICTURE = Path(__file__).parent.parent / "docs" / "img" / "batching.svg"
POLICY = BatchPolicy(max_batch_size=4, wait_ms=30)
PER_ITEM_S, FIXED_S = 0.002, 0.020
ARRIVALS_MS = (0, 3, 5, 9, 14, 19, 23, 26, 31, 78, 81, 140, 176)
LEARNT = (1, 4, 2, 3, 1, 4)
"""Batches before the picture begins, so that their cost is known."""
LEFT, TOP, ROW, SCALE = 64, 58, 22, 3.6


@dataclass(eq=False)
class Call:
    """One call, and what became of it (milliseconds)."""

    number: int
    came_ms: float
    id: str = ""
    stopped: str | None = None
    seconds: float = 0.0
    expires_at: float = 0.0
    spans: CallSpans = field(default_factory=lambda: CallSpans("req"))
    began_ms: float = 0.0
    ended_ms: float = 0.0
    reason: str = ""


async def gathered() -> list[Call]:
    """The calls of the picture, done."""
    loop, running = asyncio.get_running_loop(), list[list[Call | None]]()

    async def body(calls: list[Call | None]) -> Sequence[Any]:
        running.append(calls)
        for call in calls:
            if call is not None:
                call.began_ms = (loop.time() - zero_s) * 1000
        await asyncio.sleep(PER_ITEM_S * len(calls) + FIXED_S)
        return calls

    method = Method(
        name="f",
        call=body,
        style=Style.COROUTINE,
        binder=Binder(body),
        example=None,
        check=None,
        batch=POLICY,
    )
    gathering = Batcher({"f": method}, max_inputs=8, threads=CallThreads(), clock=loop.time)
    for size in LEARNT:
        await asyncio.gather(
            *(gathering.share("f", Call(0, 0), (None,), {}, None) for _ in range(size))
        )
    zero_s = loop.time()

    async def one(call: Call) -> None:
        await asyncio.sleep(call.came_ms / 1000)
        share = await gathering.share("f", call, (call,), {}, None)
        call.ended_ms = (loop.time() - zero_s) * 1000
        call.reason = share.line.decode().partition("reason=")[2].partition(";")[0]

    calls = [Call(n + 1, ms) for n, ms in enumerate(ARRIVALS_MS)]
    await asyncio.gather(*map(one, calls))
    return calls


def drawn(calls: Sequence[Call]) -> str:
    """The picture."""
    bottom = TOP + ROW * len(calls)
    end_ms = max(call.ended_ms for call in calls)
    width, height = LEFT + end_ms * SCALE + 110, bottom + 62
    batches: dict[float, list[Call]] = {}
    for call in calls:
        batches.setdefault(call.began_ms, []).append(call)
    parts = [HEAD % (width, height)]
    for ms in range(0, int(end_ms) + 1, 20):
        x = LEFT + ms * SCALE
        parts.append(
            f'<path class="grid" d="M{x:g} {TOP - 6}V{bottom}"/><text class="text" x="{x:g}" y="{bottom + 16}">{ms} ms</text>'
        )
    for call in calls:
        y, came, began, ended = (
            TOP + ROW * (call.number - 1),
            *(LEFT + ms * SCALE for ms in (call.came_ms, call.began_ms, call.ended_ms)),
        )
        parts.append(
            f'<text class="name" x="{LEFT - 12}" y="{y + 13}" text-anchor="end">call {call.number}</text>'
        )
        parts.append(
            f'<rect class="wait" x="{came:g}" y="{y + 4}" width="{max(1.5, began - came):g}" height="{ROW - 10}"/>'
        )
        parts.append(
            f'<rect class="run" x="{began:g}" y="{y + 2}" width="{ended - began:g}" height="{ROW - 6}" rx="3"/>'
        )
    for began_ms, members in batches.items():
        x, y = LEFT + members[0].ended_ms * SCALE + 6, TOP + ROW * (members[0].number - 1) + 13
        parts.append(f'<text class="why" x="{x:g}" y="{y:g}">{members[0].reason}</text>')
        top, last = TOP + ROW * (members[0].number - 1), TOP + ROW * members[-1].number - 2
        parts.append(f'<path class="edge" d="M{LEFT + began_ms * SCALE:g} {top}V{last}"/>')
    return "\n".join(
        [
            *parts,
            FOOT % (bottom + 33, bottom + 44, bottom + 33, bottom + 44, bottom + 44),
            "</svg>\n",
        ]
    )


HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" role="img" aria-labelledby="t d"
     font-family="system-ui, sans-serif" font-size="12">
  <title id="t">Calls that share batches</title>
  <desc id="d">Thirteen calls on a time line. Each waits a little, then computes together with others; beside each batch stands why it went.
  While one batch computes, the calls that come gather for the next one.</desc>
  <style>
    .grid { stroke: #d0d7de; stroke-width: 1 } .text { fill: #59636e; text-anchor: middle }
    .name { fill: #1f2328 } .why { fill: #bc6c00; font-weight: 600 }
    .wait { fill: #ffd8a8 } .run { fill: #3b7dd8 } .edge { stroke: #bc6c00; stroke-width: 2.5 }
    .head { fill: #1f2328; font-size: 14px; font-weight: 600 }
    @media (prefers-color-scheme: dark) {
      .grid { stroke: #30363d } .text { fill: #9da7b1 } .name { fill: #f0f6fc } .head { fill: #f0f6fc }
      .why { fill: #f0a63a } .wait { fill: #6b4a16 } .run { fill: #4c8fe8 } .edge { stroke: #f0a63a }
    }
  </style>
  <text class="head" x="20" y="28">max_batch_size=4, wait_ms=30; a batch of n takes 2·n + 20 ms</text>"""
FOOT = """  <rect class="wait" x="64" y="%g" width="18" height="12"/><text class="name" x="88" y="%g">waits</text>
  <rect class="run" x="140" y="%g" width="18" height="12" rx="3"/><text class="name" x="164" y="%g">computes</text>
  <text class="why" x="236" y="%g">why the batch went</text>"""


def main() -> None:
    """Draw it."""
    calls = virtual_time.run(gathered())
    PICTURE.write_text(drawn(calls))
    for call in calls:
        print(
            f"call {call.number}: came {call.came_ms:g}, began {call.began_ms:.1f}, ended {call.ended_ms:.1f} ms, {call.reason}"
        )


if __name__ == "__main__":
    main()
