"""The part of vLLM 0.33 that `tokentwin.integrations.vllm` touches, with its names and signatures and no engine behind.

For machines without vLLM: what is checked here is types, shapes and errors. Decisions are compared with vLLM itself in
`on_vllm.py`.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest


class PauseState(Enum):
    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


class RequestStatus(Enum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


class EngineCoreEventType(Enum):
    SCHEDULED = 0


@dataclass
class RequestError:
    code: str
    message: str


@dataclass(slots=True)
class NewRequestData:
    req_id: str
    block_ids: tuple[list[int], ...]

    @classmethod
    def from_request(cls, request: Any, block_ids: Any, prefill: Any = None, *, uses_mrope: bool) -> Any:
        assert isinstance(block_ids, tuple)
        return cls(request.request_id, block_ids)


@dataclass(slots=True)
class SchedulerOutput:
    """Slots, so that a field that vLLM does not have cannot be set."""

    scheduled_new_reqs: list[Any]
    scheduled_cached_reqs: Any
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)


class Blocks:
    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        return None if allow_none and not self.ids else (list(self.ids),)


class KVCacheManager:
    """Pages without a prefix cache."""

    def __init__(self, num_blocks: int, size: int) -> None:
        self.size = size
        self.free_ids = list(range(1, num_blocks))
        self.block_pool = SimpleNamespace(
            num_gpu_blocks=num_blocks, get_num_free_blocks=lambda: len(self.free_ids)
        )
        self.tables: dict[str, list[int]] = {}

    def get_computed_blocks(self, request: Any) -> tuple[Any, int, int]:
        return None, 0, 0

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        pass

    def get_blocks(self, request_id: str) -> Blocks:
        return Blocks(self.tables[request_id])

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        has_scheduled_reqs: bool = True,
    ) -> Blocks | None:
        table = self.tables.get(request.request_id, [])
        end = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
        if full_sequence_must_fit and -(-request.num_tokens // self.size) > len(self.free_ids):
            return None
        lacking = max(-(-end // self.size) - len(table), 0)
        if lacking > len(self.free_ids):
            return None
        new, self.free_ids = self.free_ids[:lacking], self.free_ids[lacking:]
        self.tables[request.request_id] = table + new
        return Blocks(new)

    def free(self, request: Any) -> None:
        self.free_ids += self.tables.pop(request.request_id, [])


class RequestQueue:
    pass


class FcfsQueue(deque[Any], RequestQueue):
    add_request = deque.append
    pop_request = deque.popleft
    prepend_request = deque.appendleft
    remove_request = deque.remove

    def peek_request(self) -> Any:
        return self[0]


class Request:
    def __init__(
        self, request_id: str, prompt: int, max_tokens: int, *, arrival: float = 0.0, **extra: Any
    ) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = prompt
        self._all_token_ids = [0] * prompt
        self.max_tokens = max_tokens
        self.sampling_params = SimpleNamespace(extra_args=extra)
        self.arrival_time = arrival
        self.priority = 0
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = self.num_output_placeholders = self.num_stale_output_tokens = 0
        self.num_preemptions = self.next_decode_eligible_step = self.shared_prefix_boundary = 0
        self.drop_stale_output = self.resumable = self.is_prefill_chunk = False
        self.lora_request = self.prefill_stats = None
        self.mm_features: list[Any] = []

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED


class Scheduler:
    """vLLM's bookkeeping around a step; `schedule` schedules nothing while it is paused, as vLLM's."""

    def __init__(self, vllm_config: Any, num_blocks: int, block_size: int) -> None:
        self.vllm_config = vllm_config
        self.scheduler_config = vllm_config.scheduler_config
        self.cache_config = SimpleNamespace(enable_prefix_caching=False)
        self.lora_config = self.connector = self.ec_connector = self.aux_output_connector = None
        self.is_encoder_decoder = self.has_mamba_layers = self.log_stats = self.use_v2_model_runner = False
        self.adaptive_long_prefill_threshold = self.model_uses_mrope = self.requires_kv_delivery = False
        self.prefix_replay_tokens = self.current_step = self.num_executed_steps = 0
        self.num_sampled_tokens_per_step = 1
        self.block_size = block_size
        self.max_model_len = vllm_config.model_config.max_model_len
        self.max_num_active_reqs = self.scheduler_config.max_num_seqs
        self.max_num_scheduled_tokens = self.scheduler_config.max_num_batched_tokens
        self.scheduler_reserve_full_isl = True
        self.kv_cache_manager = KVCacheManager(num_blocks, block_size)
        self.requests: dict[str, Any] = {}
        self.waiting: Any = FcfsQueue()
        self.running: list[Any] = []
        self.deferred_waiting: set[Any] = set()
        self._inflight_prefills: set[Any] = set()
        self.grammar_compile_error_reqs: dict[str, Any] = {}
        self.prev_step_scheduled_req_ids: set[str] = set()
        self.reset_preempted_req_ids: set[str] = set()
        self._pause_state = PauseState.UNPAUSED

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        return True

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        assert request.status is RequestStatus.RUNNING
        self.kv_cache_manager.free(request)
        request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        request.num_preemptions += 1
        self.waiting.prepend_request(request)
        self.reset_preempted_req_ids.add(request.request_id)

    def _make_cached_request_data(
        self, running_reqs: Any, resumed_reqs: Any, num_scheduled_tokens: Any, drafts: Any, new_blocks: Any
    ) -> Any:
        rows = list(itertools.chain(running_reqs, resumed_reqs))
        return SimpleNamespace(
            req_ids=[r.request_id for r in rows],
            resumed_req_ids={r.request_id for r in resumed_reqs},
            new_block_ids=[new_blocks[r.request_id].get_block_ids(allow_none=True) for r in rows],
        )

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        assert self._pause_state is PauseState.PAUSED_ALL, "vLLM would schedule on its own"
        self.current_step += 1
        self.prev_step_scheduled_req_ids = set()
        output = SchedulerOutput([], None, {}, 0, preempted_req_ids=self.reset_preempted_req_ids)
        self._update_after_schedule(output)
        return output

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens += count
        self.reset_preempted_req_ids = set()

    def deliver(self, output: SchedulerOutput) -> list[str]:
        """One token to each request whose tokens are all computed; returns who finished."""
        finished = []
        for request_id in output.num_scheduled_tokens:
            request = self.requests[request_id]
            if request.num_computed_tokens < request.num_tokens:
                continue
            request._all_token_ids.append(0)
            if request.num_output_tokens == request.max_tokens:
                request.status = RequestStatus.FINISHED
                self.running.remove(request)
                self.kv_cache_manager.free(request)
                del self.requests[request_id]
                finished.append(request_id)
        return finished


class AsyncScheduler(Scheduler):
    pass


def config(additional: Any = None, **changes: Any) -> Any:
    """A `VllmConfig` of small limits."""
    scheduler = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "policy": "fcfs",
        "async_scheduling": False,
        "enable_chunked_prefill": True,
        "long_prefill_token_threshold": 0,
        "watermark": 0.0,
        "prefill_schedule_interval": 1,
    }
    known = {name: changes.pop(name) for name in list(changes) if name in scheduler}
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(**{**scheduler, **known}),
        model_config=SimpleNamespace(max_model_len=200, supports_multimodal_inputs=False),
        additional_config=additional or {},
        **{"speculative_config": None, **changes},
    )


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.33.0") -> None:
    """Make `import vllm` find this."""
    names: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        "vllm.outputs": {"RequestError": RequestError},
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.sched": {},
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": AsyncScheduler},
        "vllm.v1.core.sched.interface": {"PauseState": PauseState},
        "vllm.v1.core.sched.output": {"NewRequestData": NewRequestData, "SchedulerOutput": SchedulerOutput},
        "vllm.v1.core.sched.request_queue": {"RequestQueue": RequestQueue},
        "vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler},
        "vllm.v1.engine": {"EngineCoreEventType": EngineCoreEventType},
        "vllm.v1.request": {"RequestStatus": RequestStatus},
    }
    for name, content in names.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "tokentwin.integrations.vllm", raising=False)
