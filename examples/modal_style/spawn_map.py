"""Many calls in the background, each of which knows its own id."""

import pilotlight as modal

app = modal.App("style-spawn-map")


@app.function(max_containers=4)
def stage(item: int, offset: int = 0) -> tuple[int, bool]:
    return item + offset, modal.current_function_call_id() is not None


@app.local_entrypoint()
def main() -> None:
    stage.spawn_map(range(3), kwargs={"offset": 10})
    calls = stage.spawn_map([1, 2])
    print("stages:", modal.FunctionCall.gather(*calls))
