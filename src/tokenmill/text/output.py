"""From what an engine says about one choice to the text that its reader sees.

Pure and synchronous: the server and the Python API put their own effects around it.
"""

from __future__ import annotations

import msgspec

from tokenmill.core.messages import SequenceOutput
from tokenmill.core.types import FinishReason, SamplingParams, TokenLogprobs
from tokenmill.text.detokenizer import Detokenizer
from tokenmill.text.stop import StopStrings
from tokenmill.text.tokenizer import Tokenizer


class Delta(msgspec.Struct, frozen=True):
    """New text of one choice and the tokens that came with it.

    `text` is safe to show: it ends with a whole character and holds no part of a stop string. `tokens` includes the
    token that ended the choice, which has no text of its own. `logprobs` (if they were asked for) and `offsets` run
    beside `tokens`; an offset is the number of characters of the choice's text before the token. `stop_token`: the last of
    them, if it is a token that ends a choice.
    """

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    offsets: list[int]
    finish_reason: FinishReason | None
    stop_token: int | None = None


class OutputText:
    """One choice. Push every `SequenceOutput` of it, in order, until a delta has a finish reason.

    A stop string ends the choice before the engine knows: when a delta has a finish reason and the output that was
    pushed has none, abort the choice with reason `STOP` and push nothing more.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, continues=True)
        self._stop = StopStrings(params.stop, params.include_stop_str_in_output)
        self._decoded = 0
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._offsets: list[int] = []
        self.token_count = 0
        self.finish_reason: FinishReason | None = None

    def push(self, output: SequenceOutput) -> Delta | None:
        """What there is to show, or None: tokens without text wait for the text that they begin."""
        assert self.finish_reason is None, "nothing follows the end of a choice"
        text = ""
        for index, token in enumerate(output.tokens):
            self._note(token, output.logprobs[index] if output.logprobs is not None else None)
            shown, stopped = self._watch(self._decode(token, output))
            text += shown
            if stopped:
                last = index == len(output.tokens) - 1  # what follows would not have been made, one token at a time
                return self._delta(text, FinishReason.STOP, output.stop_token if last else None)
        if output.finish_reason is None:
            return self._delta(text, None) if text else None
        shown, stopped = self._watch(self._detokenizer.flush())
        text += shown if stopped else shown + self._stop.flush()
        return self._delta(text, FinishReason.STOP if stopped else output.finish_reason, output.stop_token)

    def _note(self, token: int, logprobs: TokenLogprobs | None) -> None:
        self._tokens.append(token)
        self._offsets.append(self._decoded)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self.token_count += 1

    def _decode(self, token: int, output: SequenceOutput) -> str:
        ends = output.stop_token is not None and token == output.stop_token
        if ends and not self._params.include_stop_str_in_output:
            return ""
        text = self._detokenizer.push(token)
        self._decoded += len(text)
        return text

    def _watch(self, text: str) -> tuple[str, bool]:
        """The part of `text` that may be shown, and whether a stop string ended it."""
        if self.token_count < self._params.min_tokens:
            return text, False
        return self._stop.feed(text)

    def _delta(self, text: str, finish_reason: FinishReason | None, stop_token: int | None = None) -> Delta:
        self.finish_reason = finish_reason
        logprobs = self._logprobs if self._params.logprobs is not None else None
        delta = Delta(text, self._tokens, logprobs, self._offsets, finish_reason, stop_token)
        self._tokens, self._logprobs, self._offsets = [], [], []
        return delta
