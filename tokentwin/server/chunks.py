"""JSON of answers: whole ones, chunks of a stream, usage and timing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tokentwin.server.backend import Delta, Timing
from tokentwin.server.errors import encode

DONE = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(content) + b"\n\n"


def timing_ms(timing: Timing) -> dict[str, float]:
    """The `metrics` of vLLM 0.33's last chunk."""
    tokens = timing.output_tokens
    decode_s = timing.decode_s
    return {
        "queue_time_ms": timing.queue_s * 1e3,
        "time_to_first_token_ms": timing.ttft_s * 1e3,
        "generation_time_ms": decode_s * 1e3,
        "mean_itl_ms": timing.mean_itl_s * 1e3,
        "tokens_per_second": (tokens - 1) / decode_s if decode_s > 0 else 0.0,
    }


@dataclass(slots=True)
class Answers:
    """The answers to one HTTP request, of one prompt or several, as far as they have come.

    `chat` says which of the two formats to write. Answers are numbered through all prompts.
    """

    id: str
    model: str
    created: int
    chat: bool
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    last_timing: Timing | None = None
    texts: dict[int, list[str]] = field(default_factory=dict)
    ends: dict[int, Delta] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    _prefix: str = field(init=False)

    def __post_init__(self) -> None:
        head = self._head("chat.completion.chunk" if self.chat else "text_completion")
        self._prefix = json.dumps(head, ensure_ascii=False, separators=(",", ":"))[:-1] + ","

    def count(self, delta: Delta) -> None:
        """Take notice of a delta."""
        self.completion_tokens += len(delta.token_ids)
        if delta.timing is not None:
            self.last_timing = delta.timing
            self.cached_tokens = max(self.cached_tokens, delta.timing.cached_tokens)

    def keep(self, index: int, delta: Delta) -> None:
        """Take notice of a delta and keep its text for `whole`."""
        self.count(delta)
        self.texts.setdefault(index, []).append(delta.text)
        if delta.logprobs:
            self.logprobs.setdefault(index, []).extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.ends[index] = delta

    def usage(self) -> dict[str, Any]:
        """Tokens so far."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = []
        for index in sorted(self.ends):
            end, text = self.ends[index], "".join(self.texts[index])
            shown: dict[str, Any] = (
                {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            )
            choices.append(
                {
                    "index": index,
                    **shown,
                    "logprobs": self._logprobs(self.logprobs.get(index)),
                    "finish_reason": end.finish_reason,
                    "stop_reason": end.stop_reason,
                }
            )
        body = self._head("chat.completion" if self.chat else "text_completion")
        body |= {"choices": choices, "usage": self.usage()}
        if self.last_timing is not None:
            body["metrics"] = timing_ms(self.last_timing)
        return body

    def opening(self, index: int) -> bytes:
        """The first chunk of a chat answer, which names the role."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return event({**self._head("chat.completion.chunk"), "choices": [choice]})

    def chunk(self, index: int, delta: Delta, *, usage: bool) -> bytes:
        """One delta as an event. Written by hand: this is the inner loop of the server."""
        text = json.dumps(delta.text, ensure_ascii=False)
        shown = f'"delta":{{"content":{text}}}' if self.chat else f'"text":{text}'
        ending = ""
        if delta.finish_reason is not None:
            ending = f',"stop_reason":{json.dumps(delta.stop_reason, ensure_ascii=False)}'
        logprobs = json.dumps(self._logprobs(delta.logprobs)) if delta.logprobs else "null"
        more = f',"usage":{json.dumps(self.usage())}' if usage else ""
        return (
            f'data: {self._prefix}"choices":[{{"index":{index},{shown},"logprobs":{logprobs},'
            f'"finish_reason":{json.dumps(delta.finish_reason)}{ending}}}]{more}}}\n\n'
        ).encode("utf-8", "replace")

    def closing(self) -> bytes:
        """The last chunk before `[DONE]`: usage and timing, and no choices."""
        body = self._head("chat.completion.chunk" if self.chat else "text_completion")
        body |= {"choices": [], "usage": self.usage()}
        if self.last_timing is not None:
            body["metrics"] = timing_ms(self.last_timing)
        return event(body)

    def _logprobs(self, entries: list[Any] | None) -> Any:
        if not entries:
            return None
        if self.chat:
            return {"content": entries}
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries
            ],
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}
