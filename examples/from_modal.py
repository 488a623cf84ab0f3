"""A file written for Modal, ported: its one import was changed, and everything below it is as it
was.

examples/modal_style has one file for each kind; docs/how-to/from-modal.md says what ports.
"""

from __future__ import annotations

from collections.abc import Iterator

import pilotlight as modal

image = (
    modal.Image.debian_slim(python_version="3.11")
    .pip_install("numpy==2.4.6")
    .env({"TOKENIZERS_PARALLELISM": "false"})
)
app = modal.App("sentiment", image=image)

GOOD, BAD = (
    frozenset({"good", "great", "love", "happy"}),
    frozenset({"bad", "awful", "hate", "sad"}),
)


@app.cls(cpu=1, memory=512, min_containers=0, max_containers=4, scaledown_window=60, timeout=30)
@modal.concurrent(max_inputs=8, target_inputs=4)
class Classifier:
    """Counts happy and sad words; a stand-in for a model that takes seconds to load."""

    @modal.enter()
    def load(self) -> None:
        self.weights = {**dict.fromkeys(GOOD, 1), **dict.fromkeys(BAD, -1)}

    @modal.method()
    def score(self, text: str) -> int:
        return sum(self.weights.get(word.strip(".,!?").lower(), 0) for word in text.split())

    @modal.exit()
    def bye(self) -> None:
        self.weights = {}


@app.function(max_containers=2, timeout=10)
def shout(text: str, times: int = 1) -> str:
    return " ".join([text.upper()] * times)


@app.function()
def countdown(start: int) -> Iterator[int]:
    yield from range(start, 0, -1)


@app.local_entrypoint()
def main(text: str = "what a great, great day") -> None:
    classifier = Classifier()
    print("one:", classifier.score.remote(text))
    print("many:", list(classifier.score.map([text, "I hate rain", "fine"])))
    print("stars:", list(shout.starmap([("hey", 2), ("ho", 1)])))
    print("stream:", list(countdown.remote_gen(3)))
    print("later:", shout.spawn("done").get())
