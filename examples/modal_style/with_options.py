"""Other resources for some callers: each handle has instances of its own."""

import pilotlight as modal

app = modal.App("style-options")


@app.cls(cpu=1, memory=128, timeout=60)
class Worker:
    @modal.method()
    def total(self, n: int) -> int:
        return sum(i * i for i in range(n))


@app.local_entrypoint()
def main() -> None:
    print("small:", Worker().total.remote(10))
    large = Worker.with_options(cpu=2, memory=512, max_containers=2, timeout=300)
    print("large:", large().total.remote(1000))
