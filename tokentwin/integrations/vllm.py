"""A batch policy and a queue order of this project as vLLM's `--scheduler-cls`.

    vllm serve MODEL --scheduler-cls tokentwin.integrations.vllm.PolicyScheduler \\
        --additional-config '{"tokentwin": {"policy": "my_module:MyPolicy", "scheduling_policy": "sjf"}}'

Written against vLLM 0.33, whose scheduler interface is not public. A step is planned here by the policy, with vLLM's own
KV cache manager; then vLLM's `schedule` runs with nothing left to schedule, so that it makes the output and keeps its
books, and the plan is put into it before they are closed. Requests, stops, statistics and structured output stay vLLM's.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

try:
    import vllm
    from vllm.outputs import RequestError
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreEventType
    from vllm.v1.request import RequestStatus
except ImportError as error:
    raise ImportError(
        f"tokentwin.integrations.vllm runs inside vLLM 0.33, which cannot be imported here ({error})"
    ) from error

from serving.config import SchedulerConfig
from serving.errors import UsageError, nearest
from serving.policies import BatchPolicy, load_policy
from serving.policies.adaptive import parse_size_classes
from tokentwin.integrations.vllm_step import VllmStep
from tokentwin.integrations.vllm_views import RequestView, SchedulerView, WaitingView, order_key

log = logging.getLogger(__name__)

WRITTEN_FOR = "0.33."
SECTION = "tokentwin"
KEYS = ("policy", "scheduling_policy", "options")
ORDERS = ("fcfs", "priority", "sjf", "edf")
"""Queue orders that work inside vLLM; a fair share among tenants needs tenants, which vLLM's requests do not name."""


class OrderedQueue(RequestQueue):  # type: ignore[misc]
    """A queue of vLLM in one of our orders that vLLM does not have: shortest job first, earliest deadline first."""

    def __init__(self, order: str, view: Any) -> None:
        self._order, self._view = order, view
        self._heap: list[tuple[tuple[Any, ...], int, Any]] = []
        self._added = 0

    def add_request(self, request: Any) -> None:
        self._added += 1
        heapq.heappush(self._heap, (order_key(self._order, self._view(request)), self._added, request))

    def pop_request(self) -> Any:
        return heapq.heappop(self._heap)[2]

    def peek_request(self) -> Any:
        return self._heap[0][2]

    def prepend_request(self, request: Any) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Any) -> None:
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Any]) -> None:
        gone = set(requests)
        self._heap = [entry for entry in self._heap if entry[2] not in gone]
        heapq.heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Any]:
        return (entry[2] for entry in sorted(self._heap, key=lambda entry: entry[:2]))


class PolicyScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with a batch policy of this project in charge of each step.

    Which policy and queue order: `additional_config["tokentwin"]`, else the class attributes, which a subclass may set.
    Under asynchronous scheduling the object is one of vLLM's `AsyncScheduler` as well. What a policy cannot decide about
    is refused when the engine starts: speculative decoding, KV and encoder connectors, multimodal and encoder-decoder
    models, state-space layers, prefill cadences.
    """

    _pause_state: Any
    policy_name = "chunked"
    queue_order: str | None = None
    """None is vLLM's own --scheduling-policy."""

    def __new__(cls, *args: Any, **kwargs: Any) -> PolicyScheduler:
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        if config.scheduler_config.async_scheduling and not issubclass(cls, AsyncScheduler):
            cls = type(f"Async{cls.__name__}", (cls, AsyncScheduler), {"__module__": cls.__module__})
        made: PolicyScheduler = object.__new__(cls)
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not vllm.__version__.startswith(WRITTEN_FOR):
            log.warning(
                "tokentwin's scheduler was written for vLLM %sx, this is %s", WRITTEN_FOR, vllm.__version__
            )
        _refuse(self)
        name, order, options = self._chosen()
        self.batch_policy: BatchPolicy = load_policy(name, **options)
        self._views: dict[str, RequestView] = {}
        self._step: VllmStep | None = None
        self._prepared: dict[str, Any] = {}
        self._warned = False
        if order in ("sjf", "edf"):
            self.waiting = OrderedQueue(order, self._view)
        self._scheduler_view = SchedulerView(
            self._limits(order), lambda: [self._view(r) for r in self.running]
        )
        log.info("tokentwin: policy %s, queue order %s", name, order)

    # ---- vLLM's interface ----------------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """Queue a request. One that the policy can never run is answered with an error."""
        if request.resumable or request.mm_features:
            raise UsageError(
                f"request {request.request_id}: streaming input and media are not for tokentwin's policies"
            )
        super().add_request(request)
        reason = self.batch_policy.refuses(self._view(request), self._scheduler_view.config)  # type: ignore[arg-type]
        if reason:
            self.grammar_compile_error_reqs[request.request_id] = RequestError(
                code="validation_error", message=f"policy {self.batch_policy.name}: {reason}"
            )

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One step: the policy's plan in vLLM's output."""
        state = self._pause_state
        if state == PauseState.PAUSED_ALL:
            return super().schedule(throttle_prefills)
        self._step = step = self._plan(state)
        self._prepared = self._rows(step)
        self._pause_state = PauseState.PAUSED_ALL  # nothing more is scheduled; the rest of a step is done
        try:
            return super().schedule(throttle_prefills)
        finally:
            self._pause_state = state
            self._step = None

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if self._step is not None:
            for name, value in self._prepared.items():
                setattr(scheduler_output, name, value)
            if not self.use_v2_model_runner:
                self.prev_step_scheduled_req_ids.update(self._step.num_tokens_of)
            if self._step.num_tokens_of:
                self.num_executed_steps += 1
        super()._update_after_schedule(scheduler_output)

    # ---- a step --------------------------------------------------------------------------------------------

    def _plan(self, state: PauseState) -> VllmStep:
        view = self._scheduler_view
        self._views = {i: v for i, v in self._views.items() if i in self.requests}
        ready = [] if state == PauseState.PAUSED_NEW else [r for r in self.waiting if self._ready(r)]
        view.waiting = WaitingView(map(self._view, ready))
        view.used_pages = view.config.num_pages - self.kv_cache_manager.block_pool.get_num_free_blocks()
        view.wake_s = float("inf")
        for request in self.running:
            self._view(request)
        step = VllmStep(self, view, self._views, time.time())
        self.batch_policy.schedule(step)  # type: ignore[arg-type]
        return step

    def _ready(self, request: Any) -> bool:
        """Whether a waiting request may be admitted: not refused, its grammar compiled, no old output in flight."""
        if request.request_id in self.grammar_compile_error_reqs:
            return False
        if not self._handle_blocked_waiting_request(request):
            return False
        return not (request.num_stale_output_tokens and not request.drop_stale_output)

    def _rows(self, step: VllmStep) -> dict[str, Any]:
        """The fields of the output that say what runs."""
        v2 = self.use_v2_model_runner  # it has forgotten a preempted request, which is new to it again
        resumed = [] if v2 else [r for r in step.joined if r.request_id in step.resumed]
        started = [r for r in step.joined if v2 or r.request_id not in step.resumed]
        new = [
            NewRequestData.from_request(
                r,
                step.new_blocks[r.request_id].get_block_ids(),
                *([r._all_token_ids] if v2 else []),
                uses_mrope=self.model_uses_mrope,
            )
            for r in started
        ]
        counts = {r.request_id: step.num_tokens_of[r.request_id] for r in (*step.extended, *step.joined)}
        return {
            "scheduled_new_reqs": new,
            "scheduled_cached_reqs": self._make_cached_request_data(
                step.extended, resumed, counts, {}, step.new_blocks
            ),
            "num_scheduled_tokens": counts,
            "total_num_scheduled_tokens": step.num_tokens,
        }

    # ---- for the step --------------------------------------------------------------------------------------

    def long_prefill_threshold(self) -> int:
        """vLLM's cap on a request's chunk; it does not bind a lone request. 0 is none."""
        requests = sum(self.get_request_counts())
        threshold = self.scheduler_config.long_prefill_token_threshold if requests > 1 else 0
        if threshold > 0 and self.adaptive_long_prefill_threshold:
            threshold = max(threshold, self.scheduler_config.max_num_batched_tokens // requests)
        return int(threshold)

    def start_running(self, request: Any, at_s: float) -> None:
        """Take a request out of the queue and give it a seat."""
        if self.waiting.peek_request() is request:
            self.waiting.pop_request()
        else:
            self.waiting.remove_request(request)
        self.deferred_waiting.discard(request)
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        if self.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED, at_s)

    def warn_budget(self, num_tokens: int) -> None:
        """Say once that the policy wants more tokens in a step than there can be."""
        if not self._warned:
            self._warned = True
            log.warning(
                "policy %s wants %d tokens in a step; vLLM holds %d (--max-num-batched-tokens): prompts are cut",
                self.batch_policy.name,
                num_tokens,
                self.max_num_scheduled_tokens,
            )

    def _view(self, request: Any) -> RequestView:
        view = self._views.get(request.request_id)
        if view is None or view._request is not request:
            view = self._views[request.request_id] = RequestView(request)
        return view

    # ---- what was asked for --------------------------------------------------------------------------------

    def _chosen(self) -> tuple[str, str, Mapping[str, Any]]:
        config = self.vllm_config.additional_config
        section = config.get(SECTION, {}) if isinstance(config, dict) else {}
        if not isinstance(section, dict):
            raise UsageError(f"--additional-config: {SECTION} must be a mapping with {', '.join(KEYS)}")
        for key in section:
            if key not in KEYS:
                raise UsageError(
                    f"--additional-config: {SECTION}: unknown key {key!r}; {nearest(str(key), KEYS)}"
                )
        vllm_order = self.scheduler_config.policy
        order = section.get("scheduling_policy", self.queue_order or vllm_order)
        if order not in ORDERS:
            raise UsageError(
                f"--additional-config: scheduling_policy {order!r}; {nearest(str(order), ORDERS)}"
            )
        if order in ("fcfs", "priority") and order != vllm_order:
            raise UsageError(f"scheduling_policy {order} is vLLM's own: set --scheduling-policy {order}")
        if order in ("sjf", "edf") and vllm_order != "fcfs":
            raise UsageError(
                f"--scheduling-policy {vllm_order} has no effect with queue order {order}; leave it out"
            )
        options = dict(section.get("options", {}))
        if isinstance(options.get("size_classes"), str):
            options["size_classes"] = parse_size_classes(options["size_classes"])
        return section.get("policy", self.policy_name), order, options

    def _limits(self, order: str) -> SchedulerConfig:
        config = self.scheduler_config
        return SchedulerConfig(
            num_pages=self.kv_cache_manager.block_pool.num_gpu_blocks - 1,
            page_tokens=self.block_size,
            max_num_seqs=self.max_num_active_reqs,
            max_num_batched_tokens=self.max_num_scheduled_tokens,
            max_model_len=self.max_model_len,
            enable_prefix_caching=bool(self.cache_config.enable_prefix_caching),
            enable_chunked_prefill=config.enable_chunked_prefill,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            queue_order=order,
            reserve_full_isl=self.scheduler_reserve_full_isl,
            watermark=config.watermark,
            async_scheduling=bool(config.async_scheduling),
        )


def _refuse(scheduler: Any) -> None:
    """Raise UsageError for what a policy cannot decide about."""
    config = scheduler.vllm_config
    present = {
        "speculative decoding": config.speculative_config is not None,
        "a KV connector": scheduler.connector is not None,
        "an encoder connector": scheduler.ec_connector is not None,
        "an auxiliary output connector": scheduler.aux_output_connector is not None,
        "an encoder-decoder model": scheduler.is_encoder_decoder,
        "a multimodal model": bool(config.model_config.supports_multimodal_inputs),
        "a model with state-space layers": scheduler.has_mamba_layers,
        "replay of sliding windows": bool(scheduler.prefix_replay_tokens),
        "--prefill-schedule-interval": scheduler.scheduler_config.prefill_schedule_interval > 1,
    }
    for what, there in present.items():
        if there:
            raise UsageError(f"tokentwin's scheduler does not support {what}; use vLLM's own")
