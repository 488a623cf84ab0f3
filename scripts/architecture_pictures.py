"""Draws docs/img/processes.svg and docs/img/request.svg, the pictures of docs/architecture.md.

`python -m scripts.architecture_pictures` from the root of the repository, after a name changed.
Classes in the picture of a request must be in the code, else nothing is drawn."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.documentation import ROOT, methods

LINE = 18
STYLE = """
    .box { fill: #ffffff; stroke: #57606a; stroke-width: 1.5 }
    .user { fill: #fff4e5; stroke: #bc6c00 }
    .line { fill: none; stroke: #57606a; stroke-width: 1.5 }
    .hot { stroke: #bc6c00; stroke-width: 2.5 }
    .name { fill: #1f2328; font-weight: 600 }
    .text { fill: #59636e }
    .tip { fill: #57606a }
    @media (prefers-color-scheme: dark) {
      .box { fill: #161b22; stroke: #8b949e }
      .user { fill: #2d2008; stroke: #f0a63a }
      .line { stroke: #8b949e } .hot { stroke: #f0a63a }
      .name { fill: #f0f6fc } .text { fill: #9da7b1 } .tip { fill: #8b949e }
    }"""


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box: its corner, its size, a name and lines below it."""

    x: int
    y: int
    width: int
    name: str
    lines: Sequence[str] = ()
    is_user_code: bool = False

    @property
    def height(self) -> int:
        """Room for the name and the lines."""
        return 34 + LINE * len(self.lines)


@dataclass(frozen=True, kw_only=True)
class Arrow:
    """An arrow along points, with a text at a point; `is_hot`: of a warm call."""

    points: Sequence[tuple[int, int]]
    text: str = ""
    at: tuple[int, int] = (0, 0)
    anchor: str = "middle"
    is_hot: bool = False


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture, and what it says to those who do not see it."""

    file: str
    title: str
    description: str
    size: tuple[int, int]
    boxes: Sequence[Box]
    arrows: Sequence[Arrow]


PROCESSES = Picture(
    file="processes.svg",
    title="The four processes",
    description=(
        "A client calls the activator over HTTP. The activator forwards to a worker over the "
        "instance's Unix socket, asks the snapshotter to start and stop instances, and gets routes "
        "and keys from the controller, to which it sends usage records. The snapshotter starts "
        "slots: a shim is PID 1 of each, and forks or restores workers. The snapshotter leases "
        "weights from the weight cache, which reads blobs from a directory or S3."
    ),
    size=(960, 420),
    boxes=(
        Box(x=20, y=60, width=110, name="client", lines=("HTTP, SDK",)),
        Box(
            x=250,
            y=40,
            width=230,
            name="activator",
            lines=("request path, autoscaler", "metering: a journal"),
        ),
        Box(
            x=700,
            y=40,
            width=230,
            name="worker",
            lines=("your code, in a slot of its own",),
            is_user_code=True,
        ),
        Box(
            x=60,
            y=230,
            width=230,
            name="controller",
            lines=("control API, dashboard", "ledger, rollouts, alerts"),
        ),
        Box(
            x=400,
            y=230,
            width=230,
            name="snapshotter",
            lines=("the node agent: boot, fork,", "checkpoint, restore, stop"),
        ),
        Box(x=720, y=230, width=190, name="shim", lines=("PID 1 of the slot",)),
        Box(
            x=400,
            y=350,
            width=230,
            name="weight cache",
            lines=("models on disk, in page cache",),
        ),
    ),
    arrows=(
        Arrow(points=((130, 86), (250, 86)), is_hot=True),
        Arrow(
            points=((480, 76), (700, 76)),
            text="HTTP/1.1, instance's socket",
            at=(590, 66),
            is_hot=True,
        ),
        Arrow(points=((290, 110), (175, 230)), text="routes, keys, usage:", at=(110, 160)),
        Arrow(points=(), text="HTTP, controller.sock", at=(110, 178)),
        Arrow(points=((430, 110), (515, 230)), text="start, stop, events:", at=(560, 160)),
        Arrow(points=(), text="RPC, snapshotter.sock", at=(560, 178)),
        Arrow(points=((290, 265), (400, 265)), text="instances,", at=(345, 238)),
        Arrow(points=(), text="snapshots", at=(345, 254)),
        Arrow(points=((630, 260), (720, 260)), text="shim.sock", at=(675, 250)),
        Arrow(points=((815, 230), (815, 92)), text="fork, restore", at=(865, 165)),
        Arrow(points=((515, 300), (515, 350)), text="leases", at=(545, 330)),
        Arrow(
            points=((175, 300), (175, 378), (400, 378)), text="prefetch, pin, drop", at=(275, 370)
        ),
        Arrow(points=((760, 378), (630, 378)), text="blobs: a directory or S3", at=(845, 382)),
    ),
)
REQUEST = Picture(
    file="request.svg",
    title="The life of a request",
    description=(
        "ClientConnection asks RouteCache for the path and key. When they are known, FastPath "
        "reserves a slot and sends to the WorkerConnection. Otherwise the "
        "Gateway passes the request to an API, RequestResolver finds function and revision, "
        "CallPipeline admits it, CallRunner reserves a slot of the Throttler and forwards. Without "
        "a free slot, InstanceLifecycle passes StartAdmission and has the Fleet start one: "
        "the node agent's InstanceStarter runs the ladder."
    ),
    size=(960, 330),
    boxes=(
        Box(x=20, y=30, width=170, name="ClientConnection", lines=("parse, limits",)),
        Box(x=240, y=30, width=170, name="RouteCache", lines=("find_warm",)),
        Box(x=460, y=30, width=190, name="FastPath", lines=("admit, reserve, meter",)),
        Box(x=740, y=30, width=200, name="WorkerConnection", lines=("send",)),
        Box(x=20, y=140, width=170, name="Gateway", lines=("the API of the path",)),
        Box(x=210, y=140, width=170, name="RequestResolver", lines=("authenticate, route",)),
        Box(x=400, y=140, width=140, name="CallPipeline", lines=("admit",)),
        Box(x=560, y=140, width=150, name="CallRunner", lines=("reserve, retry",)),
        Box(x=740, y=140, width=200, name="Attempt", lines=("record, deadline, forward",)),
        Box(x=20, y=250, width=150, name="Throttler", lines=("request_scale_up",)),
        Box(x=190, y=250, width=170, name="InstanceLifecycle", lines=("start",)),
        Box(x=380, y=250, width=190, name="StartAdmission", lines=("quota, share, room",)),
        Box(x=590, y=250, width=120, name="NodeFleet", lines=("start",)),
        Box(x=740, y=250, width=200, name="InstanceStarter", lines=("node agent: the ladder",)),
    ),
    arrows=(
        Arrow(points=((190, 56), (240, 56)), is_hot=True),
        Arrow(points=((410, 56), (460, 56)), is_hot=True),
        Arrow(points=((650, 56), (740, 56)), text="warm", at=(695, 48), is_hot=True),
        Arrow(points=((60, 82), (60, 140)), text="not cached, …", at=(68, 104), anchor="start"),
        Arrow(
            points=((555, 82), (555, 114), (150, 114), (150, 140)),
            text="not at once: no free slot, …",
            at=(350, 106),
        ),
        Arrow(points=((190, 166), (210, 166))),
        Arrow(points=((380, 166), (400, 166))),
        Arrow(points=((540, 166), (560, 166))),
        Arrow(points=((710, 166), (740, 166))),
        Arrow(points=((840, 140), (840, 82))),
        Arrow(
            points=((635, 192), (635, 220), (95, 220), (95, 250)),
            text="no free slot",
            at=(365, 214),
        ),
        Arrow(points=((170, 276), (190, 276))),
        Arrow(points=((360, 276), (380, 276))),
        Arrow(points=((570, 276), (590, 276))),
        Arrow(points=((710, 276), (740, 276)), text="", at=(725, 268)),
        Arrow(points=((840, 250), (840, 192)), text="its slots", at=(848, 226), anchor="start"),
    ),
)


def draw(picture: Picture) -> str:
    """The picture as SVG."""
    width, height = picture.size
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"',
        '  aria-labelledby="t d" font-family="system-ui, sans-serif" font-size="14">',
        f'  <title id="t">{html.escape(picture.title)}</title>',
        f'  <desc id="d">{html.escape(picture.description)}</desc>',
        f"  <style>{STYLE}\n  </style>",
        '  <defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8"',
        '    markerHeight="8" markerUnits="userSpaceOnUse" orient="auto">',
        '    <path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>',
    ]
    for arrow in picture.arrows:
        if arrow.points:
            path = " L".join(f"{x} {y}" for x, y in arrow.points)
            kind = "line hot" if arrow.is_hot else "line"
            out.append(f'  <path class="{kind}" d="M{path}" marker-end="url(#a)"/>')
        if arrow.text:
            (x, y), text = arrow.at, html.escape(arrow.text)
            out.append(
                f'  <text class="text" x="{x}" y="{y}" text-anchor="{arrow.anchor}">{text}</text>'
            )
    for box in picture.boxes:
        kind, middle = ("box user" if box.is_user_code else "box"), box.x + box.width // 2
        out.append(
            f'  <rect class="{kind}" x="{box.x}" y="{box.y}" width="{box.width}" '
            f'height="{box.height}" rx="8"/>'
        )
        for number, text in enumerate((box.name, *box.lines)):
            out.append(
                f'  <text class="{"text" if number else "name"}" x="{middle}" '
                f'y="{box.y + 23 + LINE * number}" text-anchor="middle">{html.escape(text)}</text>'
            )
    return "\n".join([*out, "</svg>", ""])


def missing_names() -> list[str]:
    """Names of classes in the picture of a request that the code does not have."""
    names = {box.name for box in REQUEST.boxes}
    return sorted(names - methods(names).keys())


def main() -> None:
    """Draw both. Raises SystemExit for a name that is not in the code."""
    if missing := missing_names():
        raise SystemExit(f"these are no classes: {', '.join(missing)}")
    for picture in (PROCESSES, REQUEST):
        (ROOT / "docs" / "img" / picture.file).write_text(draw(picture))


if __name__ == "__main__":
    main()
