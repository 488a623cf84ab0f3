"""Estimates the tokens of a prompt before an engine has counted them: learned per revision from
earlier counts.

A prompt of b bytes has about s·b + c tokens: s depends on the tokenizer, c is added by the chat
template. Both are a least-squares fit with decaying weights, with two artificial prompts (three
bytes per token, the minimum of English) as a prior."""

from __future__ import annotations

from collections import OrderedDict

from activator.llm.request_size import PromptSize, TokenDemand

BYTES_PER_TOKEN = 3.0
"""Default without data; English has 4 to 5, code 3, most other scripts 2 to 3."""
LONG_TOKEN_BYTES = 8.0
"""No text has more bytes per token on average, without white space; a revision with a higher
measured value uses that."""
_TEMPLATE_TOKENS = 8.0
_FAR_BYTES = 3000.0
_DECAY = 0.98
"""Decay of a prompt's weight with each further one: the last fifty make up two thirds."""
_MIN_SLOPE, _MAX_SLOPE = 1 / 64, 2.0
_MAX_TEMPLATE = 4096.0
_FIRST_ANSWER = 256.0
_ANSWER_WEIGHT = 0.05
_ROOM = 4
"""An answer without a limit is expected to be at most this many times as long as the average."""
MAX_KNOWN = 4096
"""Maximum number of revisions kept, by last use."""


class TokenEstimate:
    """The estimate of one revision. Owner: the event loop."""

    __slots__ = ("_answer", "_const", "_n", "_seen", "_slope", "_sx", "_sxx", "_sxy", "_sy")

    def __init__(self) -> None:
        self._n = self._sx = self._sy = self._sxx = self._sxy = 0.0
        self._seen = 0
        self._answer = _FIRST_ANSWER
        self._slope, self._const = 1 / BYTES_PER_TOKEN, _TEMPLATE_TOKENS

    def __repr__(self) -> str:
        return (
            f"<TokenEstimate {1 / self._slope:.2f} bytes per token + {self._const:.0f} tokens, "
            f"{self._seen} seen>"
        )

    def tokens(self, size: PromptSize) -> int:
        """Estimated tokens of a prompt."""
        if not size.text_bytes:
            return size.tokens
        return size.tokens + int(size.text_bytes * self._slope + self._const) + 1

    def least(self, size: PromptSize) -> int:
        """Lower bound of the tokens, used for refusals."""
        return size.tokens + int(
            min(size.packed_bytes / LONG_TOKEN_BYTES, size.packed_bytes * self._slope / 2)
        )

    def answer(self) -> int:
        """Expected tokens of an answer without a limit, on the high side."""
        return max(1, int(_ROOM * self._answer))

    def learn(self, text_bytes: int, tokens: int) -> None:
        """Record an engine's token count of a prompt, including the template."""
        self._seen += 1
        self._n = self._n * _DECAY + 1
        self._sx = self._sx * _DECAY + text_bytes
        self._sy = self._sy * _DECAY + tokens
        self._sxx = self._sxx * _DECAY + text_bytes * text_bytes
        self._sxy = self._sxy * _DECAY + text_bytes * tokens
        self._solve()

    def learn_answer(self, tokens: float) -> None:
        """Record the length of an answer that was not cut off."""
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


class TokenEstimates:
    """The estimates of recently called revisions. Owner: the event loop."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, TokenEstimate] = OrderedDict()

    def __repr__(self) -> str:
        return f"<TokenEstimates of {len(self._known)} revisions>"

    def of(self, revision_key: str) -> TokenEstimate:
        """The estimate of one revision."""
        known = self._known.get(revision_key)
        if known is None:
            known = self._known[revision_key] = TokenEstimate()
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(revision_key)
        return known


def learn(
    estimate: TokenEstimate, asked: TokenDemand, *, tokens_in: int, tokens_out: int, is_ended: bool
) -> None:
    """Record an engine's counts of a whole call. `is_ended`: its answers were not cut off."""
    if asked.is_text and tokens_in:
        estimate.learn(asked.text_bytes // len(asked.prompts), tokens_in // len(asked.prompts))
    if is_ended and asked.answers:
        estimate.learn_answer(tokens_out / asked.answers)
