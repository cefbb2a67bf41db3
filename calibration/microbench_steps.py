"""One step of the engine with a stop-watch around every operator, at any composition that one asks for.

The step is the engine's own (`StepRunner.run`): its model, its operators, its caches, its sampling. Each layer's weights
are another layer's, so buffers rotate and caches are as cold as in service. On the CPU the watch reads the thread's CPU
time, which neighbours do not stretch. On CUDA it marks events on the stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realengine.batch import Batch, LayerCache
from realengine.cuda import Uploads
from realengine.inputs import Moves, StepInputs
from realengine.models import HeadNorms, Model
from realengine.ops import Attend, Linear, Ops, Weight
from realengine.runner import StepRunner
from realengine.seats import Draws

GEMMS = ("qkv", "o", "gate_up", "down", "lm_head")
PARTS = (*GEMMS, "norm", "act", "attention", "embed", "sample", "rest")
"""What a step's time is divided into; `rest` is what lies between the operators."""


@dataclass(frozen=True, slots=True)
class Composition:
    """What a step computes: decodes with their contexts (current token included), chunks as (tokens, before)."""

    decodes: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    sampled: int | None = None
    """Sequences that draw a token; all unless told otherwise."""

    @property
    def num_seqs(self) -> int:
        return len(self.decodes) + len(self.chunks)

    @property
    def num_sampled(self) -> int:
        """Rows through the LM head."""
        return self.num_seqs if self.sampled is None else self.sampled

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(tokens for tokens, _ in self.chunks)

    @property
    def kv_tokens(self) -> int:
        """Tokens that its sequences hold."""
        return sum(self.decodes) + sum(tokens + before for tokens, before in self.chunks)

    @property
    def key(self) -> str:
        """A short name: `d4x256 c64+128`."""
        words = [f"d{self.decodes.count(c)}x{c}" for c in dict.fromkeys(self.decodes)]
        words += [f"c{tokens}+{before}" for tokens, before in self.chunks]
        if self.sampled is not None:
            words.append(f"s{self.sampled}")
        return " ".join(words)


@dataclass(slots=True)
class Watch:
    """Laps by part of the step; `mark` reads the clock (seconds), or leaves a CUDA event to be read later."""

    mark: Callable[[], Any]
    between: Callable[[Any, Any], float]
    laps: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict)

    def timed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run` with every call timed under `name`."""

        def call(*args: Any) -> Any:
            begun = self.mark()
            out = run(*args)
            self.laps.setdefault(name, []).append((begun, self.mark()))
            return out

        return call

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call."""
        found = {name: sum(self.between(a, b) for a, b in laps) for name, laps in self.laps.items()}
        self.laps = {}
        return found


def cpu_watch() -> Watch:
    """CPU seconds of this thread."""
    return Watch(time.thread_time, lambda begun, ended: float(ended - begun))


def cuda_watch() -> Watch:  # pragma: no cover - needs a GPU
    """Device seconds between events on the current stream."""

    def mark() -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    return Watch(mark, lambda begun, ended: float(begun.elapsed_time(ended)) / 1e3)


class _TimedOps:
    """The model's operators, watched."""

    def __init__(self, ops: Ops, watch: Watch) -> None:
        self._ops, self._watch = ops, watch
        self.add_norm = watch.timed("norm", ops.add_norm)
        self.silu_mul = watch.timed("act", ops.silu_mul)

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        return self._ops.linear(weight, bias)

    def attention(self, batch: Batch, num_heads: int, num_kv_heads: int) -> Attend:
        made: Attend = self._watch.timed("attention", self._ops.attention)(batch, num_heads, num_kv_heads)

        def attend(qkv: Tensor, cache: LayerCache, norms: HeadNorms | None) -> Tensor:
            out: Tensor = self._watch.timed("attention", made)(qkv, cache, norms)
            return out

        return attend


class _TimedRows:
    """The embedding, whose look-up is indexing."""

    def __init__(self, table: Tensor, watch: Watch) -> None:
        self._look_up = watch.timed("embed", lambda ids: table[ids])

    def __getitem__(self, ids: Tensor) -> Tensor:
        out: Tensor = self._look_up(ids)
        return out


def watched(model: Model, watch: Watch) -> Model:
    """The same model over the same weights, with every operator timed."""
    weights = model.weights
    layers = [
        replace(
            layer,
            qkv=watch.timed("qkv", layer.qkv),
            o=watch.timed("o", layer.o),
            gate_up=watch.timed("gate_up", layer.gate_up),
            down=watch.timed("down", layer.down),
        )
        for layer in weights.layers
    ]
    timed = replace(
        weights,
        embedding=_TimedRows(weights.embedding, watch),  # type: ignore[arg-type]
        layers=layers,
        head=watch.timed("lm_head", weights.head),
    )
    return Model(model.architecture, timed, _TimedOps(model.ops, watch), model.ranks, model.kv_cache_dtype)


class StepBench:
    """Runs compositions on a step runner's model and caches, and says where their time goes."""

    def __init__(
        self,
        step: StepRunner,
        page_tokens: int,
        *,
        between: Callable[[], object] = lambda: None,
        max_seqs: int = 8192,
        seed: int = 0,
    ) -> None:
        """`between` is done before every step that counts, outside its time."""
        self._between = between
        self._device, self._page_tokens = step.device, page_tokens
        cuda = step.device.type == "cuda"
        self._watch = cuda_watch() if cuda else cpu_watch()
        self._uploads = Uploads(step.device) if cuda else None
        self._step = StepRunner(
            watched(step.model, self._watch), step.caches, step.swap, max_seqs, step.device
        )
        self._plain = StepRunner(step.model, step.caches, step.swap, max_seqs, step.device)
        self._step.recent = self._plain.recent = step.recent
        self._rng = np.random.default_rng(seed)
        self._vocab = step.model.architecture.shape.vocab_size
        self.num_pages = step.caches[0].k.shape[0] - 1

    def fits(self, what: Composition) -> bool:
        """Whether the cache has the pages."""
        sizes = (*what.decodes, *(tokens + before for tokens, before in what.chunks))
        return sum(-(-size // self._page_tokens) for size in sizes) <= self.num_pages

    @torch.inference_mode()
    def warm(self, max_tokens: int) -> None:
        """Let libraries prepare a product of every number of tokens, as they have after a while of service."""
        if self._device.type != "cpu":
            return
        model = self._plain.model
        layer, dtype = model.weights.layers[0], model.weights.embedding.dtype
        shape = model.architecture.shape
        widths = {
            layer.qkv: shape.hidden_size,
            layer.o: shape.num_heads * shape.head_dim,
            layer.gate_up: shape.hidden_size,
            layer.down: shape.intermediate_size,
        }
        for tokens in range(1, max_tokens + 1):
            for product, width in widths.items():
                product(torch.zeros(tokens, width, dtype=dtype))

    def run(self, what: Composition) -> dict[str, float]:
        """Seconds of one such step by `PARTS`, and `total`."""
        inputs, draws = self.inputs(what), _greedy(what.num_sampled)
        if self._uploads is None:
            parts, total_s = self._run_cpu(inputs, draws)
        else:  # pragma: no cover - needs a GPU
            parts, total_s = self._run_cuda(inputs, draws)
        named = {name: parts.get(name, 0.0) for name in PARTS[:-1]}
        return named | {"rest": max(total_s - sum(named.values()), 0.0), "total": total_s}

    def _run_cpu(self, inputs: StepInputs, draws: Draws) -> tuple[dict[str, float], float]:
        """A plain run for the whole and a watched one for the shares: reading clocks takes time too.

        The plain one comes after the host's work, as in service, where a step finds its own code cold.
        """
        self._between()
        begun_s = time.thread_time()
        self._plain.run(inputs, draws, torch.from_numpy)
        total_s = time.thread_time() - begun_s
        parts, watched_s = self._run_watched(inputs, draws)
        return {name: seconds * total_s / watched_s for name, seconds in parts.items()}, total_s

    def _run_watched(self, inputs: StepInputs, draws: Draws) -> tuple[dict[str, float], float]:
        draw, self._step.draw = self._step.draw, self._watch.timed("sample", self._step.draw)  # type: ignore[method-assign]
        begun_s = time.thread_time()
        try:
            self._step.run(inputs, draws, torch.from_numpy)
        finally:
            self._step.draw = draw  # type: ignore[method-assign]
        return self._watch.take(), time.thread_time() - begun_s

    def _run_cuda(
        self, inputs: StepInputs, draws: Draws
    ) -> tuple[dict[str, float], float]:  # pragma: no cover
        from realengine.cuda import arrays_of

        assert self._uploads is not None
        self._step.prepare(inputs)
        sent = self._uploads.send(arrays_of(draws) + arrays_of(inputs))

        def put(array: npt.NDArray[np.generic]) -> Tensor:
            return sent[id(array)]

        with torch.inference_mode():
            # The device is kept busy while the host queues the step, or events would time the host.
            torch.cuda._sleep(int(2e7))  # type: ignore[no-untyped-call]
            begun = self._watch.mark()
            logits = self._step.model.forward(self._step.batch(inputs, put), self._step.caches)
            self._watch.timed("sample", self._step.draw)(logits, inputs, draws, put)
            ended = self._watch.mark()
            torch.cuda.synchronize(self._device)
        return self._watch.take(), self._watch.between(begun, ended)

    def inputs(self, what: Composition) -> StepInputs:
        """Such a step as the engine would describe it: random tokens, pages in a row from anywhere."""
        new = np.array([1] * len(what.decodes) + [tokens for tokens, _ in what.chunks])
        end = np.array([*what.decodes, *(tokens + before for tokens, before in what.chunks)])
        size = self._page_tokens
        pages = -(-end // size)
        # As the pool gives them out: in a row, from anywhere.
        first = int(self._rng.integers(self.num_pages))
        chosen = (first + np.arange(int(pages.sum()))) % self.num_pages + 1
        table = np.zeros((len(new), int(pages.max())), np.int32)
        table[np.arange(int(pages.max())) < pages[:, None]] = chosen
        starts = np.cumsum(new) - new
        row = np.repeat(np.arange(len(new)), new)
        positions = np.arange(len(row)) + (end - new - starts)[row]
        decodes = len(what.decodes)
        seats = np.arange(len(new))
        sampled = seats[: what.num_sampled]
        return StepInputs(
            index=0,
            ids=self._rng.integers(0, self._vocab, len(row)),
            in_flight=None,
            token_seats=seats[row],
            positions=positions,
            kv_slots=table[row, positions // size].astype(np.int64) * size + positions % size,
            page_table=table,
            context_len=end.astype(np.int32),
            query_start=(np.append(starts, len(row))[decodes:] - decodes).astype(np.int32),
            num_decodes=decodes,
            max_query=int(new.max()),
            longest=int(end.max()),
            sample_rows=(starts + new - 1)[sampled],
            sample_seats=sampled,
            sample_positions=end[sampled],
            plan_rows=sampled,
            moves=Moves(),
        )


def _greedy(rows: int) -> Draws:
    zeros = np.zeros(rows, np.float32)
    return Draws(
        zeros, np.zeros(rows, np.int32), zeros + 1, zeros, np.zeros(rows, np.int64), greedy=True, logprobs=-1
    )


def repeated(values: Sequence[float]) -> tuple[float, float]:
    """(mean, log spread) of repeats: service adds up what interference costs, and a median would leave that out."""
    logs = np.log(np.maximum(values, 1e-12))
    spread = 1.4826 * float(np.median(np.abs(logs - np.median(logs))))
    return float(np.mean(values)), spread
