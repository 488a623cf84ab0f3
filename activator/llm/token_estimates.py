"""How many tokens a prompt has before an engine has counted them: learned, for each revision, from
what engines counted before.

A prompt of b bytes has about s·b + c tokens: s is the tokenizer's, c what the chat template adds.
Both are the least squares through what was seen, older prompts counting less, with two made-up
prompts (three bytes to a token, as English has at least) while little was."""

from __future__ import annotations

from collections import OrderedDict

from activator.llm.request_size import PromptSize, TokenDemand

BYTES_PER_TOKEN = 3.0
"""Where nothing was seen; English has 4 to 5, code 3, most other scripts 2 to 3."""
LONG_TOKEN_BYTES = 8.0
"""No text has so many bytes to a token on average, white space aside; a revision that was seen to
have more is believed."""
_TEMPLATE_TOKENS = 8.0
_FAR_BYTES = 3000.0
_DECAY = 0.98
"""Weight of a prompt beside the next one: the last fifty make up two thirds."""
_MIN_SLOPE, _MAX_SLOPE = 1 / 64, 2.0
_MAX_TEMPLATE = 4096.0
_FIRST_ANSWER = 256.0
_ANSWER_WEIGHT = 0.05
_ROOM = 4
"""An answer without a bound is expected to be at most so many times as long as they are on
average."""
MAX_KNOWN = 4096
"""Revisions that are remembered, the ones used last."""


class Estimate:
    """Of one revision. Owner: the event loop."""

    __slots__ = ("_answer", "_const", "_n", "_seen", "_slope", "_sx", "_sxx", "_sxy", "_sy")

    def __init__(self) -> None:
        self._n = self._sx = self._sy = self._sxx = self._sxy = 0.0
        self._seen = 0
        self._answer = _FIRST_ANSWER
        self._slope, self._const = 1 / BYTES_PER_TOKEN, _TEMPLATE_TOKENS

    def __repr__(self) -> str:
        return (
            f"<Estimate {1 / self._slope:.2f} bytes per token + {self._const:.0f} tokens, "
            f"{self._seen} seen>"
        )

    def tokens(self, size: PromptSize) -> int:
        """Tokens that a prompt probably has."""
        if not size.text_bytes:
            return size.tokens
        return size.tokens + int(size.text_bytes * self._slope + self._const) + 1

    def least(self, size: PromptSize) -> int:
        """Tokens that it has at least, to refuse by."""
        return size.tokens + int(
            min(size.packed_bytes / LONG_TOKEN_BYTES, size.packed_bytes * self._slope / 2)
        )

    def answer(self) -> int:
        """Tokens that an answer without a bound is expected to have, generously."""
        return max(1, int(_ROOM * self._answer))

    def learn(self, text_bytes: int, tokens: int) -> None:
        """An engine counted so many tokens of a prompt, its template included."""
        self._seen += 1
        self._n = self._n * _DECAY + 1
        self._sx = self._sx * _DECAY + text_bytes
        self._sy = self._sy * _DECAY + tokens
        self._sxx = self._sxx * _DECAY + text_bytes * text_bytes
        self._sxy = self._sxy * _DECAY + text_bytes * tokens
        self._solve()

    def learn_answer(self, tokens: float) -> None:
        """An answer that ended by itself had so many."""
        self._answer += _ANSWER_WEIGHT * (tokens - self._answer)

    def _solve(self) -> None:
        prior = 1 / (1 + self._seen)
        far_tokens = _FAR_BYTES / BYTES_PER_TOKEN + _TEMPLATE_TOKENS
        n, sx, sxx = (
            self._n + 2 * prior,
            self._sx + prior * _FAR_BYTES,
            self._sxx + prior * _FAR_BYTES**2,
        )
        sy = self._sy + prior * (_TEMPLATE_TOKENS + far_tokens)
        sxy = self._sxy + prior * _FAR_BYTES * far_tokens
        spread = n * sxx - sx * sx
        slope = (n * sxy - sx * sy) / spread if spread > 1e-6 * n * sxx else sxy / sxx
        const = (sy - slope * sx) / n
        if const < 0:
            slope, const = sxy / sxx, 0.0
        if not _MIN_SLOPE <= slope <= _MAX_SLOPE:
            slope = min(_MAX_SLOPE, max(_MIN_SLOPE, slope))
            const = (sy - slope * sx) / n
        self._slope, self._const = slope, min(_MAX_TEMPLATE, max(0.0, const))


class Estimates:
    """Of all revisions that were called here lately. Owner: the event loop."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Estimate] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Estimates of {len(self._known)} revisions>"

    def of(self, revision_key: str) -> Estimate:
        """That of one revision."""
        known = self._known.get(revision_key)
        if known is None:
            known = self._known[revision_key] = Estimate()
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(revision_key)
        return known


def learn(
    estimate: Estimate, asked: TokenDemand, *, tokens_in: int, tokens_out: int, is_ended: bool
) -> None:
    """What an engine counted of a whole call. `is_ended`: its answers ended by themselves."""
    if asked.is_text and tokens_in:
        estimate.learn(asked.text_bytes // len(asked.prompts), tokens_in // len(asked.prompts))
    if is_ended and asked.answers:
        estimate.learn_answer(tokens_out / asked.answers)
