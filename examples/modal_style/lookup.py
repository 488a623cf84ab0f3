"""A deployed app, used from another program."""

import pilotlight as modal

app = modal.App("style-lookup")


@app.function()
def add(a: int, b: int) -> int:
    return a + b


@app.cls()
class Power:
    base: int = modal.parameter(default=2)

    @modal.method()
    def of(self, exponent: int) -> int:
        return int(self.base**exponent)


if __name__ == "__main__":
    with modal.enable_output():
        app.deploy()
    print("app:", modal.App.lookup("style-lookup").name)
    print("sum:", modal.Function.from_name("style-lookup", "add").remote(2, 3))
    Powers = modal.Cls.from_name("style-lookup", "Power")
    print("powers:", Powers().of.remote(5), Powers(base=3).of.remote(2))
    try:
        modal.App.lookup("style-missing")
    except modal.exception.NotFoundError:
        print("missing: not found")
