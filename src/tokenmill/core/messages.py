"""What a gateway (or `AsyncLLM`) and an engine process say to each other.

MessagePack structs over a length-prefixed stream (`worker/wire.py`). Every accepted `Generate` is answered by any
number of outputs and then exactly one terminal one per choice (an output with `finish_reason`), or by one `Failed`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tokenmill.core.errors import TokenmillError
from tokenmill.core.types import FinishReason, SamplingParams, Speculation, TokenLogprobs


class Generate(msgspec.Struct, frozen=True, tag="generate", kw_only=True):
    """Start `params.n` sequences over one prompt.

    The sender resolves `params.seed` and `params.max_tokens`, and names the tokens that end a text (`eos_ids`), since
    the engine has no vocabulary.

    epoch: number of this attempt at the request, repeated in what is said about it; 0 where there is only one. output: what an earlier
    attempt has put out, by choice, which is gone on from and not told again. If it is not empty, choices that are not in it are over
    and not started.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    eos_ids: tuple[int, ...] = ()
    priority: int = 1
    cache_salt: str = ""
    epoch: int = 0
    output: dict[int, list[int]] = {}

    @property
    def choices(self) -> Mapping[int, list[int]]:
        """Those that are computed, and what has been put out of each."""
        return self.output or {choice: [] for choice in range(self.params.n)}


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop a request, or one of its choices, and free its KV. The sequence's last output says `reason`:
    `STOP` when the frontend found a stop string, `ABORT` when the client has gone."""

    request_id: str
    choice: int | None = None
    reason: FinishReason = FinishReason.ABORT


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish what is running, then end the stream."""


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    """Ask for one `Stats`."""


ToEngine = Generate | Abort | Drain | GetStats


class SequenceOutput(msgspec.Struct, array_like=True):
    """What one step added to one sequence. Times are seconds on the host's monotonic clock."""

    request_id: str
    choice: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    """The end-of-sequence or stop token that ended the sequence (also the last of `tokens`)."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix tree at first admission."""
    first_scheduled: float = 0.0
    """When the sequence first entered a step (arrival to here is the queue time)."""
    sparsified_from: int | None = None
    """The position from which on the sequence has not seen all its keys and values, because its KV budget ran low."""
    dropped_tokens: list[int] = []
    """Beside `tokens`, if there is such a position: how many positions some KV head no longer had for that reason; 0 before it."""
    drafted: int = 0
    """Length of the draft that the step verified. What was right of it are all of `tokens` but the last."""
    epoch: int = 0
    """As in the `Generate`."""
    index: int = 0
    """Of the first of `tokens` in the choice's output."""
    reused: int = 0
    """Tokens of prompt and earlier output that were taken from the prefix tree at first admission; the others were computed."""


class StepOutput(msgspec.Struct, frozen=True, tag="step"):
    """All outputs of one engine step."""

    outputs: list[SequenceOutput]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request was refused or lost; nothing more will come for it. Fields as in `TokenmillError`."""

    request_id: str
    status: int
    type: str = msgspec.field(name="error_type")  # on the wire "type" is the tag
    message: str
    code: str | None = None
    param: str | None = None
    epoch: int = 0

    @classmethod
    def of(cls, error: TokenmillError, request_id: str, epoch: int = 0) -> Failed:
        """`error` as a message. An error outside a request (a failed load) has the request id ""."""
        return cls(request_id, error.status, error.type, error.message, error.code, error.param, epoch)

    def error(self) -> TokenmillError:
        """The same error again, as the most specific class of the tree that has this status, type and code."""
        tree = _descendants(TokenmillError)
        alike = [kind for kind in tree if (kind.status, kind.type) == (self.status, self.type)]
        exact = [kind for kind in alike if kind.code == self.code]
        kind = (exact or alike or [TokenmillError])[0]
        return kind(self.message, param=self.param, code=self.code)


def _descendants(kind: type[TokenmillError]) -> list[type[TokenmillError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _descendants(child))]


class EngineInfo(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """Sent once, when the engine can serve."""

    model: str
    architecture: str
    vocab_size: int
    max_model_len: int
    kv_tokens: int
    """What one sequence could have in the KV pool, were the model's context long enough. Where all layers have windows, so that there is
    no end to that: positions that all layers can have at a time."""
    kv_bytes: int
    """Of the KV pool, a draft model's included."""
    kv_bytes_per_token: int
    """Of one position in all layers and KV heads."""
    kv_format: str
    """How keys and values are kept, such as `int8/int4:64`, which is keys, values and channels per scale."""
    kv_bytes_saved_per_token: int
    """What that format takes less than bf16."""
    max_batch_size: int
    chunk_size: int
    """Prompt tokens in one step at most."""
    threads: int
    cpus: str | None = None
    """Those that the threads are kept on, as in the config; None: wherever the system puts them."""
    kernels: str
    proposer: str | None = None
    """Who drafts; None: nobody."""
    draft_model: str | None = None
    """The model that does, if one does."""
    fingerprint: str
    pid: int
    load_seconds: float
    boot: str = ""
    """Random, of this start of the process alone; "" where the engine has no process of its own."""
    address: str = ""
    """Where other workers read its frames; "" if they do not."""


class PageCounts(msgspec.Struct, frozen=True, array_like=True):
    """Pages of one size. used: those of which a running sequence holds a frame; cached: of which only the prefix tree has one;
    shared: of the used ones, those of which several sequences hold the same frame."""

    free: int
    used: int
    cached: int
    shared: int


class HandoverStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since start and gauges now, of one worker's hand-overs (docs/handover.md)."""

    leases: int
    """Prompts whose frames are kept for others, or are being computed for them."""
    leases_ended: dict[str, int]
    """By why (`worker.handover.effects.End`)."""
    reservations: int
    """Sequences that wait for frames of their prompts."""
    reads: int
    """Chunks that were copied from other workers."""
    read_bytes: int
    read_seconds: float
    waited_seconds: float
    """Between the end of a prompt elsewhere and the start of its sequence here, over all sequences: what of reading was not hidden."""
    refusals: dict[str, int]
    """Chunks that were not taken, by reason."""


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since start and gauges now, of what one worker keeps in a KV store and takes from it (docs/kv-store.md)."""

    waiting: int
    """Requests that wait for blocks."""
    fetched_tokens: int
    """Positions that came from the store and were not computed."""
    counts: dict[str, int]
    """By their names (`transfer.store.counts.Count`)."""


class Stats(msgspec.Struct, frozen=True, tag="stats", kw_only=True):
    """Counters since start and gauges now. `kv` counts are frames where nothing else is said."""

    running: int
    waiting: int
    kv_total: int
    kv_free: int
    kv_cached: int
    kv_held: int
    kv_shared: int
    """Held by several sequences."""
    kv_saved: int
    """So many more would be held if no sequence shared any."""
    kv_frame_bytes: int
    kv_unfilled: int
    """Positions of held frames, over all KV groups, for which nothing is computed."""
    kv_pages: dict[int, PageCounts]
    """By their tokens."""
    kv_dropped: int
    """Given up at points of KV budgets."""
    kv_sparsified: int
    """How often a sequence began to drop frames because of its KV budget; again when it is computed again after a preemption."""
    kv_ended: int
    """Sequences that ended because their KV budget was used up."""
    kv_refused: int
    """Requests refused because the prompt alone exceeds their KV budget."""
    prefix_queries: int
    """Prompt tokens looked up in the prefix tree."""
    prefix_hits: int
    """Prompt tokens found there."""
    preemptions: int
    evictions: int
    prompt_tokens: int
    generation_tokens: int
    steps: int
    speculation: Speculation | None = None
    """None: nobody drafts."""
    idle: bool = False
    """Whether the loop that steps has found nothing to compute, so that it stands still rightly."""
    handover: HandoverStats | None = None
    """None: it hands nothing over."""
    store: StoreStats | None = None
    """None: it has no KV store."""


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The process is to end: it should get nothing new, and be told to `Drain`."""


FromEngine = EngineInfo | StepOutput | Failed | Stats | Leaving
