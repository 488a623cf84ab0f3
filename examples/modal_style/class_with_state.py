"""A class: loaded once per instance, called many times."""

import pilotlight as modal

app = modal.App("style-class")


@app.cls(max_containers=2, scaledown_window=120, enable_memory_snapshot=True)
class Lexicon:
    @modal.enter(snap=True)
    def load(self) -> None:
        self.scores = {"good": 1, "great": 2, "bad": -1}

    @modal.enter(snap=False)
    def connect(self) -> None:
        self.calls = 0

    @modal.method()
    def score(self, text: str) -> int:
        self.calls += 1
        return sum(self.scores.get(word, 0) for word in text.lower().split())

    @modal.method()
    def rank(self, texts: list[str]) -> list[str]:
        return sorted(texts, key=self.score.local, reverse=True)

    @modal.exit()
    def close(self) -> None:
        self.scores = {}


@app.local_entrypoint()
def main() -> None:
    lexicon = Lexicon()
    print("score:", lexicon.score.remote("a great, great day"))
    print("rank:", lexicon.rank.remote(["bad day", "good day", "great day"]))
