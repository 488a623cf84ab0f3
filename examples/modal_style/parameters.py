"""A class with parameters: each set of values has instances of its own."""

import pilotlight as modal

app = modal.App("style-parameters")


@app.cls(max_containers=1)
class Translator:
    language: str = modal.parameter()
    polite: bool = modal.parameter(default=False)

    @modal.enter()
    def load(self) -> None:
        self.hello = {"de": "Hallo", "fr": "Bonjour"}[self.language]

    @modal.method()
    def greet(self, name: str) -> str:
        return f"{self.hello}, {'dear ' if self.polite else ''}{name}!"


@app.function()
def both(name: str) -> list[str]:
    return [Translator(language=language).greet.remote(name) for language in ("de", "fr")]


@app.local_entrypoint()
def main() -> None:
    print(Translator(language="de").greet.remote("Ada"))
    print(Translator(language="fr", polite=True).greet.remote("Ada"))
    print(both.remote("Bo"))
