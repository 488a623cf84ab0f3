"""Functions that call functions: one that fans out to another, and a request that starts it in the
background.

pilotlight deploy examples/pipeline.py
pilotlight call pipeline/count --arg 'texts=["to be or not to be", "that is the question"]'
"""

from collections import Counter

import pilotlight

app = pilotlight.App("pipeline")


@app.function(cpu=0.25, memory="256MiB", max_instances=4, example=["to be or not to be"])
def words(text: str) -> dict[str, int]:
    """Count the words of one text."""
    return dict(Counter(text.lower().split()))


@app.function(cpu=0.25, memory="256MiB")
def count(texts: list[str]) -> dict[str, int]:
    """Count the words of many texts, each in a call of its own."""
    total: Counter[str] = Counter()
    for counted in words.map(texts, order_outputs=False):
        total.update(counted)
    return dict(total.most_common())


@app.function(cpu=0.25, memory="256MiB")
def submit(texts: list[str]) -> str:
    """Start `count` in the background, and answer with the id of that call at once."""
    return count.spawn(texts).id
