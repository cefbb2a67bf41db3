"""A step of vLLM under construction by a batch policy: the verbs of `serving.step`, over vLLM's KV cache manager.

The rules are vLLM's own (vllm/v1/core/sched/scheduler.py, 0.33): what a request wants, when it is admitted, who is
preempted. Which request gets a verb, and for how many tokens, is the policy's choice.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from serving.errors import UsageError
from tokentwin.integrations.vllm_views import RequestView, SchedulerView, order_key

if TYPE_CHECKING:
    from serving.config import SchedulerConfig

log = logging.getLogger(__name__)


class VllmStep:
    """What a policy sees and may do while vLLM plans one step. `engine` is the `PolicyScheduler`."""

    def __init__(
        self, engine: Any, scheduler: SchedulerView, views: dict[str, RequestView], now_s: float
    ) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self.views = views
        self.now_s = now_s
        self.config: SchedulerConfig = scheduler.config
        self.token_budget: int = engine.max_num_scheduled_tokens
        self.prefill_budget: int | None = None
        """Prompt tokens that this step may still compute; None: as many as the token budget allows."""
        self.preempted: list[RequestView] = []
        self.num_tokens_of: dict[str, int] = {}
        self.new_blocks: dict[str, Any] = {}
        self.extended: list[Any] = []
        self.joined: list[Any] = []
        self.resumed: set[str] = set()
        self._at_s = time.monotonic()
        self._threshold: int = engine.long_prefill_threshold()
        self._loras: set[int] = (
            {r.lora_request.lora_int_id for r in engine.running if r.lora_request}
            if engine.lora_config
            else set()
        )

    # ---- for policies --------------------------------------------------------------------------------------

    def set_budget(self, num_tokens: int) -> None:
        """Replace the token budget; vLLM's buffers hold no more than max_num_batched_tokens."""
        most = self.engine.max_num_scheduled_tokens - self.num_tokens
        if num_tokens > most:
            self.engine.warn_budget(num_tokens)
        self.token_budget = min(num_tokens, most)

    @property
    def num_tokens(self) -> int:
        """Tokens scheduled so far in this step."""
        return sum(self.num_tokens_of.values())

    @property
    def running(self) -> list[RequestView]:
        """Running requests in order of admission."""
        return [self.views[request.request_id] for request in self.engine.running]

    @property
    def num_running(self) -> int:
        return len(self.engine.running)

    @property
    def num_decoding(self) -> int:
        """Running requests whose prompt is computed."""
        return sum(not request.is_prefill_chunk for request in self.engine.running)

    @property
    def seats(self) -> int:
        """How many more requests may run."""
        return int(self.engine.max_num_active_reqs - len(self.engine.running))

    def wanted(self, request: RequestView) -> int:
        """Tokens a running request has yet to compute; 0 when its last token is in flight."""
        r = request._request
        in_flight = r.num_output_placeholders
        if in_flight > 0 and r.num_computed_tokens + 2 - in_flight >= r.num_prompt_tokens + r.max_tokens:
            return 0
        if self.engine.current_step + 1 < r.next_decode_eligible_step:
            return 0
        wanted = r.num_tokens + in_flight - r.num_computed_tokens
        room = self.engine.max_model_len - r.num_computed_tokens - self.engine.num_sampled_tokens_per_step
        return max(int(min(wanted, room)), 0)

    def scheduled(self, request: RequestView) -> bool:
        """The request is already part of this step."""
        return request.id in self.num_tokens_of

    def extend(self, request: RequestView, num_tokens: int | None = None) -> bool:
        """Schedule a running request for `num_tokens` (all it wants by default). False when budget or pages lack."""
        if self.scheduled(request) or request._request not in self.engine.running:
            return False
        wanted = self.wanted(request)
        count = min(wanted if num_tokens is None else min(num_tokens, wanted), self.token_budget)
        return count > 0 and self._extend(request._request, count)

    def admit(self, request: RequestView, num_tokens: int | None = None, *, reserve_tokens: int = 0) -> bool:
        """Admit a waiting request with its first chunk. False when seats, budget or pages lack."""
        if request in self.preempted or self.seats < 1 or self.token_budget < 1:
            return False
        if request not in list(self.scheduler.waiting):
            return False
        return self._admit(request, num_tokens, reserve_tokens)

    def preempt(self, request: RequestView) -> None:
        """Send a running request back to the queue and undo what this step had scheduled for it."""
        r = request._request
        if r in self.joined:
            raise UsageError(
                f"a policy preempts request {request.id} in the step that admits it; vLLM's workers cannot"
            )
        self.engine.running.remove(r)
        restored = self.num_tokens_of.pop(r.request_id, 0)
        self.token_budget += restored
        if self.prefill_budget is not None and r.is_prefill_chunk:
            self.prefill_budget += restored
        self.new_blocks.pop(r.request_id, None)
        if r in self.extended:
            self.extended.remove(r)
        self.engine._preempt_request(r, self._at_s, drop_stale_output=self.engine.requires_kv_delivery)
        self.preempted.append(request)

    def continue_running(self) -> None:
        """vLLM's first loop: every running request in order, preempting the last in line when pages run out."""
        position = 0
        running = self.engine.running
        while position < len(running) and self.token_budget > 0:
            request = self.views[running[position].request_id]
            count = min(self._capped(self.wanted(request)), self.token_budget)
            if self.prefill_budget is not None and request._request.is_prefill_chunk:
                count = min(count, self.prefill_budget)
            if count <= 0 or self.scheduled(request):
                position += 1
                continue
            while not (fits := self._extend(request._request, count)):
                victim = self._victim()
                index = running.index(victim._request)
                self.preempt(victim)
                if victim is request:
                    break
                position -= index < position
            if fits:
                position += 1
            elif self.config.queue_order == "fcfs":
                break

    def admit_waiting(self) -> None:
        """vLLM's second loop: from the head of the queue until one is refused."""
        while self.scheduler.waiting and self.token_budget > 0 and self.seats > 0:
            if not self._admit(self.scheduler.waiting.peek(), None, 0):
                break

    # ---- vLLM's rules --------------------------------------------------------------------------------------

    def _capped(self, count: int) -> int:
        return min(count, self._threshold) if self._threshold else count

    def _victim(self) -> RequestView:
        running = self.running
        if self.config.queue_order == "fcfs":
            return running[-1]
        return max(running, key=lambda view: order_key(self.config.queue_order, view)[:-2])

    def _extend(self, r: Any, count: int) -> bool:
        blocks = self.engine.kv_cache_manager.allocate_slots(r, count)
        if blocks is None:
            return False
        self.extended.append(r)
        self._take(r, count, blocks, prompt=r.is_prefill_chunk)
        return True

    def _take(self, r: Any, count: int, blocks: Any, *, prompt: bool) -> None:
        self.new_blocks[r.request_id] = blocks
        self.num_tokens_of[r.request_id] = count
        self.token_budget -= count
        if self.prefill_budget is not None and prompt:
            self.prefill_budget -= count

    def _admit(self, request: RequestView, num_tokens: int | None, reserve_tokens: int) -> bool:
        engine, r = self.engine, request._request
        if engine.lora_config and r.lora_request:
            lora = r.lora_request.lora_int_id
            if len(self._loras) >= engine.lora_config.max_loras and lora not in self._loras:
                return False
        manager = engine.kv_cache_manager
        hit, cached, r.shared_prefix_boundary = manager.get_computed_blocks(r)
        if r.prefill_stats and r.num_preemptions <= 0:
            r.prefill_stats.set(
                num_prompt_tokens=r.num_prompt_tokens,
                num_local_cached_tokens=cached,
                num_external_cached_tokens=0,
            )
        count = self._capped(r.num_tokens - cached)
        budget = (
            self.token_budget if self.prefill_budget is None else min(self.token_budget, self.prefill_budget)
        )
        if budget < 1 or (not engine.scheduler_config.enable_chunked_prefill and count > budget):
            return False
        count = min(count, budget if num_tokens is None else min(num_tokens, budget))
        blocks = manager.allocate_slots(
            r,
            count,
            num_new_computed_tokens=cached,
            new_computed_blocks=hit,
            num_lookahead_tokens=max(reserve_tokens - cached - count, 0),
            full_sequence_must_fit=engine.scheduler_reserve_full_isl,
            has_scheduled_reqs=bool(engine.running),
        )
        if blocks is None:
            return False
        manager.record_prefix_cache_stats(r, cached)
        self._start(request, count, cached)
        return True

    def _start(self, request: RequestView, count: int, cached: int) -> None:
        engine, r = self.engine, request._request
        if r.status.name == "PREEMPTED":
            self.resumed.add(r.request_id)
        engine.start_running(r, self._at_s)
        self.joined.append(r)
        self.scheduler.waiting.take(request)
        if engine.lora_config and r.lora_request:
            self._loras.add(r.lora_request.lora_int_id)
        r.num_computed_tokens = cached
        if cached + count < r.num_tokens:
            engine._inflight_prefills.add(r)
        self._take(r, count, engine.kv_cache_manager.get_blocks(r.request_id), prompt=True)
