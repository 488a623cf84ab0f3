"""A class that is called from Python and over HTTP."""

import pilotlight as modal

app = modal.App("style-endpoint-on-class")
image = modal.Image.debian_slim().pip_install("fastapi")


@app.cls(image=image)
class Counter:
    @modal.enter()
    def load(self) -> None:
        self.vowels = set("aeiou")

    @modal.method()
    def count(self, text: str) -> int:
        return sum(letter in self.vowels for letter in text)

    @modal.fastapi_endpoint(docs=True)
    def web(self, text: str) -> dict[str, int]:
        return {"vowels": self.count.local(text)}


@app.local_entrypoint()
def main() -> None:
    print("vowels:", Counter().count.remote("serverless"))
