"""A small server that speaks OpenAI's API, as many do: its model repeats the prompt, and a token is a
word. HTTP/1.0, JSON with spaces. Only the standard library.

    python model_server.py PORT [OPTION=VALUE …]        options: see `ModelServer`
"""

from __future__ import annotations

import ast
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

EXTRA_WORDS = 3
"""Words of the template around a chat's messages, which its usage counts."""


class ModelServer:
    """Serves at 127.0.0.1 until `end`.

    Attributes:
        port: where it listens; 0: chosen.
        model: the only name that it knows its model by.
        usage: where a stream that asked for it has its usage: "last": in an event of its own;
            "piece": in the last piece; "null": as last, and null in all pieces; "never".
        newline: the end of a line of a stream.
        said: replaces the counts of all usage; None: the truth.
        pause_s: between two pieces of a stream.
        dies_after: pieces of a stream after which the connection breaks; 0: never.
        has_lengths: whether bodies have a length; if not, they end with the connection.
        bodies: what it was sent, newest last.
    """

    def __init__(
        self,
        port: int = 0,
        *,
        model: str = "words-1",
        usage: str = "last",
        newline: str = "\n",
        said: int | None = None,
        pause_s: float = 0.0,
        dies_after: int = 0,
        has_lengths: bool = True,
    ) -> None:
        self.model, self.usage, self.newline = model, usage, newline
        self.said, self.pause_s, self.dies_after = said, pause_s, dies_after
        self.has_lengths = has_lengths
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._server = _Listener(port, self)
        self.port = self._server.server_address[1]

    def serve(self) -> None:
        """Answer requests, until `end`."""
        self._server.serve_forever(poll_interval=0.05)

    def start(self) -> None:
        """Serve in a thread."""
        threading.Thread(target=self.serve, daemon=True).start()

    def end(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def usage_of(self, tokens_in: int, tokens_out: int) -> dict[str, Any]:
        """The member of a body that says its tokens; none where it never says any."""
        if self.usage == "never":
            return {}
        if self.said is not None:
            tokens_in = tokens_out = self.said
        total = tokens_in + tokens_out
        counts = {
            "completion_tokens": tokens_out,
            "prompt_tokens": tokens_in,
            "total_tokens": total,
        }
        return {"usage": {**counts, "prompt_tokens_details": {"cached_tokens": 0}}}


class _Listener(ThreadingHTTPServer):
    def __init__(self, port: int, of: ModelServer) -> None:
        self.of = of
        super().__init__(("127.0.0.1", port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    @property
    def _of(self) -> ModelServer:
        assert isinstance(self.server, _Listener)
        return self.server.of

    def do_GET(self) -> None:
        if self.path == "/health":
            self._reply(200, {"status": "ok"})
        elif self.path == "/slots":
            self._reply(200, {"prompts": [body.get("messages") for body in self._of.bodies]})
        else:
            self._reply(404, {"error": {"message": f"no {self.path}", "code": 404}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self._of.bodies.append(body)
        self._of.headers.append({k.lower(): v for k, v in self.headers.items()})
        if body.get("model") != self._of.model:
            message = f"the model {body.get('model')} does not exist"
            self._reply(404, {"error": {"message": message, "code": "model_not_found"}})
        elif self.path == "/v1/embeddings":
            self._embed(body)
        elif self.path in ("/v1/chat/completions", "/v1/completions"):
            self._generate(body, is_chat="chat" in self.path)
        elif self.path == "/rerank":
            self._reply(200, [{"index": 0, "score": 1.0}])
        else:
            self._reply(404, {"error": {"message": f"no {self.path}", "code": 404}})

    def _embed(self, body: dict[str, Any]) -> None:
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        rows = [
            {"object": "embedding", "index": at, "embedding": [float(len(text)), 1.0]}
            for at, text in enumerate(texts)
        ]
        counts = self._of.usage_of(sum(len(text.split()) for text in texts), 0)
        self._reply(200, {"object": "list", "data": rows, "model": self._of.model, **counts})

    def _generate(self, body: dict[str, Any], *, is_chat: bool) -> None:
        if is_chat:
            prompt = " ".join(message["content"] for message in body["messages"])
            tokens_in = len(prompt.split()) + EXTRA_WORDS
        else:
            prompt = body["prompt"]
            tokens_in = len(prompt.split())
        most = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        words = prompt.split()[:most]
        finish = "length" if len(words) == most else "stop"
        if body.get("stream"):
            self._stream(body, words, finish, tokens_in, is_chat=is_chat)
            return
        text = " ".join(words)
        said = {"message": {"role": "assistant", "content": text}}
        choice = {
            "finish_reason": finish,
            "index": 0,
            **(said if is_chat else {"text": text}),
        }
        kind = "chat.completion" if is_chat else "text_completion"
        head = {"id": "c-1", "object": kind, "created": 1, "model": self._of.model}
        counts = self._of.usage_of(tokens_in, len(words))
        self._reply(200, {"choices": [choice], **head, **counts})

    def _stream(
        self,
        body: dict[str, Any],
        words: list[str],
        finish: str,
        tokens_in: int,
        *,
        is_chat: bool,
    ) -> None:
        is_asked = bool((body.get("stream_options") or {}).get("include_usage"))
        style = self._of.usage if is_asked else "never"
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.end_headers()
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        head = {"id": "c-1", "object": kind, "created": 1, "model": self._of.model}
        null = {"usage": None} if style == "null" else {}
        counts = self._of.usage_of(tokens_in, len(words))

        def send(choices: list[dict[str, Any]], **more: Any) -> None:
            event = {"choices": choices, **head, **more}
            self._event(json.dumps(event))

        if is_chat:
            first = {"role": "assistant", "content": None}
            send([{"finish_reason": None, "index": 0, "delta": first}], **null)
        for at, word in enumerate(words, 1):
            if self._of.dies_after and at > self._of.dies_after:
                return
            time.sleep(self._of.pause_s)
            text = word if at == 1 else f" {word}"
            said = {"delta": {"content": text}} if is_chat else {"text": text}
            send([{"finish_reason": None, "index": 0, **said}], **null)
        end: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        last = [{"finish_reason": finish, "index": 0, **end}]
        send(last, **(counts if style == "piece" else null))
        if style in ("last", "null"):
            send([], **counts)
        self._event("[DONE]")

    def _event(self, data: str) -> None:
        self.wfile.write(f"data: {data}{self._of.newline}{self._of.newline}".encode())
        self.wfile.flush()

    def _reply(self, status: int, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        if self._of.has_lengths:
            self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Nothing."""


def main() -> None:
    """Serve, with the options of the command line."""
    port, *options = sys.argv[1:]
    given = dict(option.split("=", 1) for option in options)
    ModelServer(int(port), **{name: ast.literal_eval(text) for name, text in given.items()}).serve()


if __name__ == "__main__":
    main()
