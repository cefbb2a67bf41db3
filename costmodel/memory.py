"""Where a GPU's memory goes, and how many KV pages are left: from first principles, line by line.

An engine may use `gpu_memory_utilization` of the device's memory. Weights, the largest transient of a step
and what the runtime holds are subtracted; the rest becomes pages of `block_size` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.formats import GemmFormat, gemm_format, kv_format
from costmodel.model import ModelShape
from costmodel.pipeline import layers_per_stage
from costmodel.pricer import graph_sizes
from costmodel.profile import DeviceProfile
from serving.errors import InfeasibleError, UsageError

GIB = 1024**3

NON_TORCH_BYTES = 0.28 * GIB
"""Loaded kernels, cuBLAS workspaces and attention scratch that appear while the engine profiles itself; an
estimate."""

NCCL_BYTES = 0.6 * GIB
"""Buffers and channels of the collectives on each rank when there is more than one; an estimate."""

GRAPH_BASE_BYTES = 0.2 * GIB
GRAPH_EACH_BYTES = 5 * 2**20
"""CUDA-graph pool: a shared base and a few MiB per captured size (vLLM logs 0.3 to 0.6 GiB for 16 to 67
sizes)."""

SAMPLER_BYTES_PER_LOGIT = 27
"""Per vocabulary entry and sequence while sampling with top-k and top-p in PyTorch: the 16-bit logits (2),
their float32 copy (4), sorted values (4) and 64-bit indices (8), probabilities (4), their running sum
(4), a mask (1)."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one rank, and what they mean for sequences. `arithmetic()` prints the derivation."""

    model: str
    device: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    total_bytes: int
    gpu_memory_utilization: float
    weight_bytes: int
    activation_bytes: int
    non_torch_bytes: int
    graph_bytes: int
    """CUDA-graph pool; part of the budget only when `graphs_in_budget`."""
    graphs_in_budget: bool
    kv_bytes_per_token: float
    """On one rank, over its layers."""
    kv_formula: str
    block_size: int
    num_blocks: int
    max_model_len: int
    recent_bytes: int = 0
    """16-bit copies of the last tokens of every sequence, beside a quantised cache."""
    data_parallel_size: int = 1
    """Replicas among whose ranks the experts lie; each has the pages below."""

    @property
    def budget_bytes(self) -> int:
        """What the engine may use."""
        return int(self.total_bytes * self.gpu_memory_utilization)

    @property
    def kv_cache_bytes(self) -> int:
        """Memory of the KV pages."""
        return int(self.num_blocks * self.block_size * self.kv_bytes_per_token)

    @property
    def kv_tokens(self) -> int:
        """Tokens the pages hold."""
        return self.num_blocks * self.block_size

    @property
    def longest_context(self) -> int:
        """Longest sequence that can run: the model's limit or all pages (one is reserved by the engine)."""
        return min(self.max_model_len, max(0, self.num_blocks - 1) * self.block_size)

    def paged_sequences(self, tokens: int = 4096) -> int:
        """Sequences of `tokens` tokens that fit, each in whole pages."""
        return max(0, self.num_blocks - 1) // -(-tokens // self.block_size)

    def contiguous_sequences(self) -> int:
        """Sequences that fit when each reserves `max_model_len` tokens in one piece, whatever it uses."""
        return self.kv_tokens // self.max_model_len

    def arithmetic(self) -> list[str]:
        """The derivation, one printable line per step."""
        ranks = self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size
        where = f"each of {ranks} x {self.device}" if ranks > 1 else f"one {self.device}"
        lines = [
            f"{self.model} on {where}",
            f"{'memory':<26}{_gb(self.total_bytes)}",
            f"{'x utilisation':<26}{self.gpu_memory_utilization:>9.2f} = {_gb(self.budget_bytes).strip()}",
            f"{'- weights':<26}{_gb(self.weight_bytes)}",
            f"{'- activations, peak':<26}{_gb(self.activation_bytes)}",
            f"{'- runtime (non-torch)':<26}{_gb(self.non_torch_bytes)}",
        ]
        note = "" if self.graphs_in_budget else "   (outside the budget, as before vLLM 0.21)"
        sign = "-" if self.graphs_in_budget else " "
        lines.append(f"{sign + ' CUDA graphs':<26}{_gb(self.graph_bytes)}{note}")
        if self.recent_bytes:
            lines.append(f"{'- recent KV in 16 bit':<26}{_gb(self.recent_bytes)}")
        held = self.max_model_len * self.kv_bytes_per_token
        lines += [
            f"{'= KV cache':<26}{_gb(self.kv_cache_bytes)}",
            f"{'KV per token':<26}{self.kv_formula}",
            f"{'pages':<26}{self.num_blocks:>9,} of {self.block_size} tokens = {self.kv_tokens:,} tokens",
            f"{'longest context':<26}{self.longest_context:>9,} tokens (model limit {self.max_model_len:,})",
            f"{'sequences of 4,096':<26}{self.paged_sequences(4096):>9,} in pages",
            f"{'  each in one piece':<26}{self.contiguous_sequences():>9,} reserving "
            f"{self.max_model_len:,} tokens ({held / 1e9:.2f} GB)",
        ]
        return lines


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:>9.2f} GB"


def kv_cache_bytes(
    num_layers: int, kv_heads: int, head_dim: int, tokens: int, bytes_per_element: float = 2.0
) -> float:
    """KV cache of one sequence: 2 (K and V) x layers x KV heads x head_dim x tokens x bytes per element."""
    return 2 * num_layers * kv_heads * head_dim * tokens * bytes_per_element


def weight_bytes(
    model: ModelShape,
    fmt: GemmFormat,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    data_parallel_size: int = 1,
    enable_expert_parallel: bool = False,
) -> int:
    """Bytes of weights on the fullest rank: quantised layers with their scales, 16-bit embedding, LM head and norms.

    With `data_parallel_size` above 1 experts lie on the ranks of so many replicas: whole ones with expert parallelism, a
    slice of each without.
    """
    tp = tensor_parallel_size
    linear = sum(fmt.matrix_bytes(g.n, g.k) for g in model.attention_gemms(tp))
    ranks, experts = tp * data_parallel_size, max(model.num_experts, 1)
    if data_parallel_size > 1 and enable_expert_parallel:
        ranks, experts = 1, -(-experts // ranks)
    mlp = sum(fmt.matrix_bytes(g.n, g.k) for g in model.mlp_gemms(ranks))
    router = model.router_gemm().weights if model.num_experts else 0
    per_layer = linear + mlp * experts + (router + model.small_params_per_layer(tp)) * 2
    vocab = model.vocab_per_rank(tp) * model.hidden_size * 2
    norm = model.hidden_size * 2
    layers = layers_per_stage(model.num_layers, pipeline_parallel_size)
    if len(layers) == 1:
        return layers[0] * per_layer + (vocab if model.tie_word_embeddings else 2 * vocab) + norm
    ends = [vocab, *(0 for _ in layers[2:]), vocab + norm]
    return max(n * per_layer + end for n, end in zip(layers, ends, strict=True))


def activation_bytes(
    model: ModelShape,
    *,
    tensor_parallel_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    data_parallel_size: int = 1,
) -> int:
    """Largest transient of a step, 16-bit activations: the widest layer of a full batch, or sampling after
    it.

    A layer holds the residual, its normalised copy and its output (3 x hidden) besides the widest pair of
    buffers: gate, up and their product in the MLP (of each chosen expert), or q, k, v and the attention
    output. A rank that shares its experts holds the gathered hidden states of all replicas' tokens and what its part of
    the experts makes of them.
    """
    tp, tokens = tensor_parallel_size, max_num_batched_tokens
    width = model.intermediate_size // tp
    mlp = 3 * width * (model.experts_per_token or 1) + (model.hidden_size * model.experts_per_token)
    if (dp := data_parallel_size) > 1:
        mlp = 3 * width * model.experts_per_token + model.hidden_size * (model.experts_per_token + 1) * dp
    qkv, o = model.attention_gemms(tp)
    layer = tokens * (3 * model.hidden_size + max(mlp, qkv.n + o.k)) * 2
    rows = min(max_num_seqs, tokens)
    sampling = tokens * model.hidden_size * 2 + rows * model.vocab_size * SAMPLER_BYTES_PER_LOGIT
    return max(layer, sampling)


def plan_memory(
    model: ModelShape,
    profile: DeviceProfile,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    data_parallel_size: int = 1,
    enable_expert_parallel: bool = False,
    gpu_memory_utilization: float = 0.92,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 1024,
    max_model_len: int | None = None,
    block_size: int = 16,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    kv_recent_tokens: int = 0,
    cuda_graphs: bool = True,
    graphs_in_budget: bool = True,
) -> MemoryPlan:
    """How one rank's memory divides, and the number of KV pages.

    `gpu_memory_utilization` defaults to 0.92 as in vLLM 0.33 (0.9 before). `graphs_in_budget`: vLLM counts
    the CUDA-graph pool inside the budget since 0.21 (pull request 30515); False for earlier engines.
    `kv_recent_tokens` are kept in 16 bit beside a quantised cache for each of `max_num_seqs` sequences.
    `data_parallel_size` counts replicas that share their experts (1: none do). Raises
    `InfeasibleError` when weights and transients leave no page, saying how much is missing and what fixes it.
    """
    if not 0.0 < gpu_memory_utilization <= 1.0:
        raise UsageError(f"--gpu-memory-utilization must be in (0, 1], not {gpu_memory_utilization}")
    if block_size < 1:
        raise UsageError(f"--block-size must be at least 1, not {block_size}")
    if pipeline_parallel_size < 1 or pipeline_parallel_size > model.num_layers:
        raise UsageError(
            f"--pipeline-parallel-size must be in 1..{model.num_layers}, not {pipeline_parallel_size}"
        )
    model.check_tensor_parallel(tensor_parallel_size)
    fmt = gemm_format(dtype, quantization)
    kv_element = kv_format(kv_cache_dtype).element_bytes(model.head_dim)
    weights = weight_bytes(
        model,
        fmt,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        data_parallel_size=data_parallel_size,
        enable_expert_parallel=enable_expert_parallel,
    )
    activations = activation_bytes(
        model,
        tensor_parallel_size=tensor_parallel_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        data_parallel_size=data_parallel_size,
    )
    ranks = tensor_parallel_size * pipeline_parallel_size * data_parallel_size
    runtime = int(NON_TORCH_BYTES + (NCCL_BYTES if ranks > 1 else 0))
    sizes = graph_sizes(max_num_seqs, max_num_batched_tokens) if cuda_graphs else []
    graphs = int(GRAPH_BASE_BYTES + GRAPH_EACH_BYTES * len(sizes)) if sizes else 0
    layers = -(-model.num_layers // pipeline_parallel_size)
    kv_heads = model.kv_heads_per_rank(tensor_parallel_size)
    per_token = kv_cache_bytes(layers, kv_heads, model.head_dim, 1, kv_element)
    budget = int(profile.facts.memory_bytes * gpu_memory_utilization)
    recent = int(max_num_seqs * kv_recent_tokens * kv_cache_bytes(layers, kv_heads, model.head_dim, 1))
    left = budget - weights - activations - runtime - recent - (graphs if graphs_in_budget else 0)
    blocks = int(left // (per_token * block_size)) if left > 0 else 0
    plan = MemoryPlan(
        model=model.name,
        device=profile.facts.product,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        total_bytes=profile.facts.memory_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        weight_bytes=weights,
        activation_bytes=activations,
        non_torch_bytes=runtime,
        graph_bytes=graphs,
        graphs_in_budget=graphs_in_budget,
        kv_bytes_per_token=per_token,
        kv_formula=(
            f"2 x {layers} layers x {kv_heads} KV heads x {model.head_dim} x {kv_element:g} B "
            f"= {per_token:,.0f} B"
        ),
        block_size=block_size,
        num_blocks=blocks,
        max_model_len=max_model_len or model.max_position_embeddings,
        recent_bytes=recent,
        data_parallel_size=data_parallel_size,
    )
    if blocks < 2:
        raise InfeasibleError(_no_room(plan, left, model, quantization))
    return plan


def _no_room(plan: MemoryPlan, left: int, model: ModelShape, quantization: str | None) -> str:
    if left >= 32 * plan.kv_bytes_per_token:
        return (
            f"{plan.model} on {plan.device}: {left / 1e9:.1f} GB are left for KV and a page of {plan.block_size} tokens "
            f"takes {plan.block_size * plan.kv_bytes_per_token / 1e9:.1f} GB, two of which must fit; lower --block-size"
        )
    working = plan.activation_bytes + plan.non_torch_bytes + plan.graph_bytes
    room = 0.95 * (plan.budget_bytes - working)  # some of it has to be left for KV

    def ranks(share: float) -> int | None:
        """The fewest ranks on which `share` of today's weights fit, None where none will do."""
        weights = plan.weight_bytes * plan.tensor_parallel_size * share
        sizes = [t for t in (1, 2, 4, 8, 16) if model.num_heads % t == 0 and model.intermediate_size % t == 0]
        return next(
            (
                t
                for t in sizes
                if t >= plan.tensor_parallel_size and weights / t <= room - (NCCL_BYTES if t > 1 else 0)
            ),
            None,
        )

    fixes = []
    if (size := ranks(1.0)) is not None and size > plan.tensor_parallel_size:
        fixes.append(f"--tensor-parallel-size {size}")
    if quantization is None:
        for name, share in (("fp8", 0.5), ("int4_wo", 0.27)):
            if (size := ranks(share)) is not None:
                more = f" with --tensor-parallel-size {size}" if size > plan.tensor_parallel_size else ""
                fixes.append(f"--quantization {name}{more}")
                break
    if plan.activation_bytes > 1e9:
        fixes.append("a smaller --max-num-batched-tokens or --max-num-seqs")
    fixes = fixes or ["a GPU with more memory or a smaller model"]
    missing = f"{-left / 1e9:.1f} GB too little" if left < 0 else "no room for KV pages"
    return (
        f"{plan.model} does not fit {plan.device}: {plan.weight_bytes / 1e9:.1f} GB of weights and "
        f"{(plan.activation_bytes + plan.non_torch_bytes) / 1e9:.1f} GB of working memory in a budget of "
        f"{plan.budget_bytes / 1e9:.1f} GB leave {missing}; try {', or '.join(fixes)}"
    )


def default_limits(profile: DeviceProfile) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) that vLLM 0.33 serves with by default on this device.

    16384/1024 from 160 GiB, 8192/1024 for the H100 class (70 GiB and more, not an A100), 2048/256 below.
    """
    facts = profile.facts
    if facts.memory_bytes >= 160 * GIB:
        return 16384, 1024
    if facts.memory_bytes >= 70 * GIB and "a100" not in facts.name.lower():
        return 8192, 1024
    return 2048, 256
