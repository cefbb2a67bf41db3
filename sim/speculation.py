"""Speculative decoding in the twin: who accepts what, and what drafting and verifying cost a replica."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from costmodel.formats import kv_format
from costmodel.memory import MemoryPlan
from costmodel.model import ModelShape, load_model
from costmodel.pricer import StepPricer
from costmodel.prices import Prices
from costmodel.profile import DeviceProfile
from costmodel.speculation import (
    VERIFY_S,
    DraftPrices,
    lookup_s,
    memory_with_draft,
    seqs_captured,
    verification_s,
)
from costmodel.uncertainty import PerturbedPricer
from serving.draft_counts import DraftCounts
from serving.draft_steps import DraftLog, draft_row
from serving.errors import UsageError
from serving.plan import StepOutcome, StepPlan
from serving.request import Request
from serving.scheduler import Scheduler
from serving.speculative_config import FLAG, SpeculativeConfig
from sim.acceptance import Acceptance, make_acceptance
from sim.record import Ints


@dataclass(frozen=True, slots=True)
class Speculation:
    """Drafts of a deployment: what they cost and what becomes of them. `speculator` makes a replica's share."""

    config: SpeculativeConfig
    queries_per_kv_head: int
    draft: DraftPrices | None
    """The passes of a draft model, or of the first layers; None where the host drafts."""
    verify_s: float = VERIFY_S
    seed: int = 0
    """Of the luck of drafts, which is a request's and not a replica's."""

    def speculator(self) -> Speculator:
        """For one replica of a run."""
        acceptance = make_acceptance(self.config.acceptance, self.config.num_speculative_tokens, self.seed)
        return Speculator(self, acceptance)

    def perturbed(self, pricer: object) -> Speculation:
        """The same with the calibration error of `pricer`, where it has one: drafts run on the same kernels."""
        if self.draft is None or not isinstance(pricer, PerturbedPricer):
            return self
        inner = PerturbedPricer(self.draft.pricer, pricer.factors)
        return replace(self, draft=replace(self.draft, pricer=inner))


@dataclass(slots=True)
class Speculator:
    """A replica's drafts."""

    speculation: Speculation
    acceptance: Acceptance
    counts: DraftCounts = field(default_factory=DraftCounts)
    steps: DraftLog = field(default_factory=DraftLog)

    def note(self, step: int, plan: StepPlan) -> None:
        """Write down what drafts add to the work of a plan that is step number `step`."""
        draft = self.speculation.draft
        self.steps.add(step, draft_row(plan, None if draft is None else draft.own_cache))

    # ---- what it costs -------------------------------------------------------------------------------------

    def step_s(self, pricer: Prices, plan: StepPlan) -> float:
        """Device time of a step: verification, then the passes that draft for the next one."""
        s = self.speculation
        drafts = plan.drafts
        prefills = [(chunk.num_tokens, chunk.context) for chunk in plan.chunks]
        verifying = int(drafts.sum()) if drafts is not None else 0
        total_s = verification_s(
            pricer,
            s.queries_per_kv_head,
            num_tokens=plan.num_tokens,
            num_sampled=plan.num_sampled + verifying,
            prefills=prefills,
            num_decodes=plan.num_decodes,
            decode_context_sum=plan.decode_context_sum,
            decode_context_max=plan.decode_context_max,
            longest_draft=int(drafts.max()) if drafts is not None else 0,
            verify_s=s.verify_s,
        )
        to_draft = plan.num_to_draft
        if s.draft is None or to_draft is None:
            return total_s
        longest = int(to_draft.max(initial=0))
        if not longest:
            # Nobody drafts: a draft model still reads prompts, to have their KV when somebody does.
            if s.draft.own_cache and prefills:
                tokens = sum(count for count, _ in prefills)
                total_s += s.draft.pass_s + s.draft.pricer.step_s(tokens, 0, prefills, 0, 0, 0)
            return total_s
        context = plan.context + plan.num_new
        drafting = to_draft > 0
        total_s += s.draft.first_pass_s(
            num_tokens=plan.num_tokens,
            prefills=prefills,
            num_decodes=plan.num_decodes,
            decode_context_sum=plan.decode_context_sum,
            decode_context_max=plan.decode_context_max,
            num_drafting=int(drafting.sum()),
            drafting_context_sum=int((context + 1)[drafting].sum()),
        )
        for nth in range(1, longest):
            rows = context[to_draft > nth] + (nth + 1)
            total_s += s.draft.later_pass_s(len(rows), int(rows.sum()), int(rows.max()))
        return total_s

    def host_s(self, plan: StepPlan) -> float:
        """Host time of drafting, beside that of any step."""
        if self.speculation.draft is not None or plan.num_to_draft is None:
            return 0.0
        drafting = plan.num_to_draft > 0
        context = (plan.context + plan.num_new)[drafting]
        return lookup_s(len(context), int(context.sum()))

    # ---- what becomes of it --------------------------------------------------------------------------------

    def outcome(self, plan: StepPlan, scheduler: Scheduler) -> tuple[StepOutcome, list[Request | None], Ints]:
        """What a step gave: its outcome, the request of each row, and the tokens that it really gets of them [rows]."""
        seqs = scheduler.seqs
        slots = plan.slots.tolist()
        rows: list[Request | None] = [scheduler.in_flight_request(slot) for slot in slots]
        sampled = np.ones(len(rows), np.int64) if plan.samples is None else plan.samples.astype(np.int64)
        padded = {admission.request for admission in plan.admitted}
        drafts = np.zeros(len(rows), np.int64) if plan.drafts is None else plan.drafts.copy()
        ids, known, room = np.zeros((3, len(rows)), np.int64)
        for row, (slot, request) in enumerate(zip(slots, rows, strict=True)):
            if request is None or request in padded:
                drafts[row] = 0
            if request is None:
                continue
            assert isinstance(request.id, int)
            ids[row] = request.id
            here = request.slot == slot
            so_far = int(seqs.known[slot]) if here else request.num_tokens
            known[row] = so_far - request.prompt_tokens
            room[row] = scheduler.finish_at(request) - so_far
        accepted = self.acceptance.accepted(ids, known, drafts)
        self.counts.count(drafts, accepted)
        counts = sampled + accepted
        given = np.minimum(counts, room)
        made: Ints | None = None
        if not scheduler.config.async_scheduling and plan.num_to_draft is not None:
            made = np.zeros(len(rows), np.int64)
            wanted = np.flatnonzero((plan.num_to_draft > 0) & (given < room))
            made[wanted] = self.acceptance.drafted(
                ids[wanted], (known + given)[wanted], plan.num_to_draft[wanted]
            )
        return StepOutcome(counts=counts, drafts=made), rows, given


def check_speculation(config: SpeculativeConfig, policy: str, asynchronous: bool | None) -> bool:
    """Whether steps are planned ahead: as in vLLM only where a draft model drafts. Raises `UsageError`."""
    if policy == "static":
        raise UsageError(f"{FLAG} has no meaning for --policy static; use chunked or continuous")
    if asynchronous and config.method != "draft_model":
        raise UsageError(
            f"--async-scheduling: drafts of method {config.method} are made between steps; use --no-async-scheduling"
        )
    return config.method == "draft_model" and policy == "chunked" if asynchronous is None else asynchronous


def plan_speculation(
    config: SpeculativeConfig,
    model: ModelShape,
    profile: DeviceProfile,
    memory: MemoryPlan,
    *,
    tensor_parallel_size: int,
    dtype: str,
    quantization: str | None,
    kv_cache_dtype: str,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    cuda_graphs: bool,
) -> tuple[Speculation, MemoryPlan]:
    """Prices of a deployment's drafts, and its memory with a draft model in it. Raises `UsageError`."""
    make_acceptance(
        config.acceptance, config.num_speculative_tokens
    )  # what cannot be fails before anything runs
    shape, weights = None, quantization
    if config.method == "draft_model":
        assert config.model is not None
        shape, weights = load_model(config.model), None
        if shape.vocab_size != model.vocab_size:
            raise UsageError(
                f"{FLAG}: {shape.name} has a vocabulary of {shape.vocab_size} tokens and {model.name} one of "
                f"{model.vocab_size}; a draft model must have the same"
            )
        memory = memory_with_draft(
            memory,
            shape,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            kv_bytes=kv_format(kv_cache_dtype).element_bytes(shape.head_dim),
        )
    elif config.method == "self":
        assert config.num_layers is not None
        if config.num_layers >= model.num_layers:
            raise UsageError(
                f"{FLAG}: num_layers {config.num_layers} is not less than the {model.num_layers} layers of {model.name}"
            )
        shape = model.model_copy(update={"num_layers": config.num_layers})
    prices = None
    if shape is not None:
        pricer = StepPricer(
            shape,
            profile,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            quantization=weights,
            kv_cache_dtype=kv_cache_dtype,
            max_num_batched_tokens=max_num_batched_tokens + max_num_seqs,
            max_num_seqs=seqs_captured(max_num_seqs, config.num_speculative_tokens),
            cuda_graphs=cuda_graphs,
        )
        prices = DraftPrices(pricer, own_cache=config.method == "draft_model")
    return Speculation(config, model.num_heads // model.num_kv_heads, prices), memory
