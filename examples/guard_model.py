"""The server of `guard.py`: a model that repeats its prompt, or reads from a book, a word for a
token. Only the standard library.

    python guard_model.py PORT
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BOOK = {
    "read me the card": "With pleasure: it is 4111 1111 1111 1111 and valid until May",
    "insult me": "Well then, you silly sausage",
}


class Server(BaseHTTPRequestHandler):
    """`POST /v1/chat/completions`, whole or as a stream, a word for a token."""

    def do_GET(self) -> None:
        """It is ready."""
        self._send("application/json", b"{}")

    def do_POST(self) -> None:
        """Answer a chat."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = body["messages"][-1]["content"]
        answer = BOOK.get(text, text)
        usage = {"prompt_tokens": len(text.split()), "completion_tokens": len(answer.split())}
        if not body.get("stream"):
            message = {"role": "assistant", "content": answer}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            whole = {"object": "chat.completion", "choices": [choice], "usage": usage}
            self._send("application/json", json.dumps(whole).encode())
            return
        pieces: list[Any] = [{"delta": {"content": f"{word} "}} for word in answer.split()]
        pieces.append({"delta": {}, "finish_reason": "stop"})
        events: list[Any] = [{"choices": [{"index": 0, **piece}]} for piece in pieces]
        events.append({"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._send("text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _send(self, content_type: str, data: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main(port: int) -> None:
    """Serve until the instance ends."""
    ThreadingHTTPServer(("127.0.0.1", port), Server).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
