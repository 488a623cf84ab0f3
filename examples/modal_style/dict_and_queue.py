"""A dict and a queue: values that functions and their callers share."""

import pilotlight as modal

app = modal.App("style-dict-and-queue")
lengths = modal.Dict.from_name("style-lengths", create_if_missing=True)
words = modal.Queue.from_name("style-words", create_if_missing=True)


@app.function()
def measure() -> int:
    done = 0
    while (word := words.get(block=False)) is not None:
        lengths[word] = len(word)
        done += 1
    words.put(done, partition="done")
    return done


@app.local_entrypoint()
async def main() -> None:
    lengths.clear()
    words.clear(all=True)
    await words.put_many.aio(["one", "three", "seven"])
    print("measured:", measure.remote(), words.get(timeout=10, partition="done"))
    print("lengths:", sorted(lengths.items()), await lengths.get.aio("two", 0), "one" in lengths)
    print("stored once:", lengths.put("one", 0, skip_if_exists=True), lengths.pop("one"))
    del lengths["three"]
    print("left:", len(lengths), words.len(total=True))
    modal.Dict.delete("style-lengths")
    await modal.Queue.delete.aio("style-words")
