"""What a scheduler may do: limits and switches, with vLLM's names and meanings."""

from __future__ import annotations

from dataclasses import dataclass

from serving.errors import UsageError

QUEUE_ORDERS = ("fcfs", "priority", "sjf", "edf", "fair")
EVICTION_ORDERS = ("lru", "lfu", "cost", "session")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one engine. Raises `UsageError` naming the field when a value cannot work.

    `num_pages` counts usable KV pages (vLLM's `num_gpu_blocks` less its null block). `reserve_full_isl` and `watermark`
    are vLLM 0.33's admission gates; `vllm_2025` turns off what is newer than the V1 engine of 2025.
    """

    num_pages: int
    page_tokens: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131072
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    queue_order: str = "fcfs"
    reserve_full_isl: bool = True
    watermark: float = 0.0
    async_scheduling: bool = False
    pipeline_parallel_size: int = 1
    """Stages of a pipeline: as many steps are in flight at once, and a sequence is in at most one that samples."""
    num_speculative_tokens: int = 0
    draft_has_kv: bool = False
    """The drafter is a model with KV of its own: k look-ahead slots and one drafting slot of the input budget."""
    disable_by_batch_size: int = 0
    """Draft nothing while more sequences than this run; 0 is off (`serving.drafting`)."""
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    """(from, to, k): draft k tokens while so many sequences run."""
    min_draft_acceptance: float = 0.0
    """Shorten a sequence's drafts to those that stand with at least this probability; 0 is off."""
    prepend_unhashed: bool = True
    """Freed pages without a hash are reused first (vLLM 0.33); off: they queue behind everything (2025)."""
    kv_eviction: str = "lru"
    """Which cached page is forgotten first (`serving.eviction`)."""
    attention_tokens: float = 0.0
    """Eviction `cost`: context at which a token's attention costs as much as the rest of the model; 0: never."""
    session_keep_s: float = 60.0
    """Eviction `session`: how much longer than others a conversation's pages stay after its first answer."""
    session_decay: float = 0.9
    """Eviction `session`: the stay shrinks by this factor from turn to turn."""
    host_cache_pages: int = 0
    """Host pages for cached prefixes that the device forgets (`serving.host_tier`); 0: they are lost."""
    swap_pages: int = 0
    """Host pages for preempted sequences; 0, or while they are full: what is preempted is computed again."""
    swap_costs: tuple[float, float, float] | None = None
    """Swap only what is dearer to compute again: seconds per token moved out and in, per token computed again, and per
    token squared. None: swap whenever there is room."""

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_tokens", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            if value < 1:
                raise UsageError(f"{name} is {value}; it must be at least 1")
        if self.long_prefill_token_threshold < 0:
            raise UsageError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold}; use 0 (off) or more tokens"
            )
        if self.pipeline_parallel_size < 1:
            raise UsageError(
                f"pipeline_parallel_size is {self.pipeline_parallel_size}; it must be at least 1"
            )
        if self.pipelined and (self.async_scheduling or self.num_speculative_tokens):
            raise UsageError(
                "pipeline_parallel_size above 1 goes with neither async_scheduling nor num_speculative_tokens"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise UsageError(
                f"watermark is {self.watermark}; it is a share of the pages, 0 or more and below 1"
            )
        if self.queue_order not in QUEUE_ORDERS:
            raise UsageError(f"queue_order is {self.queue_order!r}; use one of {', '.join(QUEUE_ORDERS)}")
        if self.kv_eviction not in EVICTION_ORDERS:
            raise UsageError(f"kv_eviction is {self.kv_eviction!r}; use one of {', '.join(EVICTION_ORDERS)}")
        if self.kv_eviction != "lru" and not self.enable_prefix_caching:
            raise UsageError(f"kv_eviction {self.kv_eviction!r} has no effect without prefix caching")
        if not self.session_keep_s >= 0:
            raise UsageError(f"session_keep_s is {self.session_keep_s}; use 0 or more seconds")
        if not 0 < self.session_decay <= 1:
            raise UsageError(f"session_decay is {self.session_decay}; use more than 0 and at most 1")
        if self.host_cache_pages < 0 or (self.host_cache_pages and not self.enable_prefix_caching):
            raise UsageError(
                f"host_cache_pages is {self.host_cache_pages}; use 0 (off) or more, and prefix caching with it"
            )
        if self.swap_pages < 0:
            raise UsageError(f"swap_pages is {self.swap_pages}; use 0 (off) or more")
        if self.swap_costs is not None and (not self.swap_pages or min(self.swap_costs) < 0):
            raise UsageError(
                f"swap_costs are {self.swap_costs}; they need swap_pages, and none may be negative"
            )
        if self.num_speculative_tokens < 0:
            raise UsageError(f"num_speculative_tokens is {self.num_speculative_tokens}; use 0 (off) or more")
        if (least := 1 + self.num_speculative_tokens + self.draft_slots) > self.max_num_batched_tokens:
            raise UsageError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; verifying "
                f"{self.num_speculative_tokens} draft tokens takes at least {least}"
            )

    @property
    def pipelined(self) -> bool:
        """Steps pass the stages of a pipeline, several at a time."""
        return self.pipeline_parallel_size > 1

    @property
    def lookahead_tokens(self) -> int:
        """KV slots reserved past a step's own tokens, for a drafter that writes KV."""
        return self.num_speculative_tokens if self.draft_has_kv else 0

    @property
    def draft_slots(self) -> int:
        """Input-budget slots that drafting takes from each scheduled request."""
        return 1 if self.draft_has_kv and self.num_speculative_tokens else 0

    def vllm_2025(self) -> SchedulerConfig:
        """The V1 engine of 2025: no full-prompt gate, no watermark, unhashed pages queued last, synchronous."""
        from dataclasses import replace

        return replace(
            self, reserve_full_isl=False, watermark=0.0, prepend_unhashed=False, async_scheduling=False
        )
