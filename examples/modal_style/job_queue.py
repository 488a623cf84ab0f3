"""Background work: submit, look for the result, collect several."""

import pilotlight as modal
from pilotlight.functions import FunctionCall, gather

app = modal.App("style-jobs")


@app.function(timeout=60)
def parse(document: str) -> dict[str, int]:
    return {"words": len(document.split())}


def result_of(call_id: str) -> dict[str, int] | None:
    try:
        result: dict[str, int] = FunctionCall.from_id(call_id).get(timeout=20)
    except TimeoutError:
        return None
    return result


@app.local_entrypoint()
def main() -> None:
    call = parse.spawn("to be or not to be")
    print("later:", result_of(call.object_id))
    print("all:", gather(parse.spawn("a b"), parse.spawn("c")))
    print("and:", modal.FunctionCall.gather(parse.spawn("d e f")))
