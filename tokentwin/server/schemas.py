"""Bodies of requests: OpenAI's fields and vLLM's. Unknown fields are ignored; known ones are checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from realengine.generation import Sampling
from serving.beams import MAX_BEAM_WIDTH
from serving.errors import UsageError
from tokentwin.server.backend import BeamOptions
from tokentwin.server.errors import ApiError

_INT64 = 1 << 63
MAX_ANSWERS = 128
MAX_PROMPTS = 1024
OPEN_ENDED = 1 << 30
"""`max_tokens` of an answer whose length the client leaves to the server."""
COMPLETION_TOKENS = 16
"""OpenAI's length of a completion that sets none."""


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")


Body = TypeVar("Body", bound=_Body)


class GenerationBody(_Body):
    """What completions and chat completions share."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    best_of: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    use_beam_search: bool | None = None
    length_penalty: float | None = Field(None, allow_inf_nan=False)
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=_INT64)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, allow_inf_nan=False)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    skip_special_tokens: bool | None = None
    priority: int | None = Field(None, ge=-_INT64, lt=_INT64)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Any = None
    logit_bias: Any = None
    truncate_prompt_tokens: Any = None

    @property
    def include_usage(self) -> bool:
        """Send a last chunk with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_each(self) -> bool:
        """Send the usage so far with each chunk."""
        return bool(self.include_usage and self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> Sampling:
        """The parameters with their defaults. Raises `ApiError` for those that cannot be.

        Of a beam search `n` is the width, and the likeliest tokens are taken.
        """
        self._check_beams()
        self._check_best_of()
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        try:
            return Sampling(
                max_tokens=OPEN_ENDED if max_tokens is None else max_tokens,
                n=self.n or 1,
                temperature=self._temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=max(0, self.top_k or 0),
                min_p=self.min_p or 0.0,
                seed=self.seed,
                stop=tuple(map(clean, stops)),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                include_stop_str_in_output=bool(self.include_stop_str_in_output),
                ignore_eos=bool(self.ignore_eos),
                min_tokens=self.min_tokens or 0,
                skip_special_tokens=self.skip_special_tokens is not False,
                logprobs=logprobs,
            )
        except UsageError as error:
            raise ApiError(str(error), param=str(error).split(" ", 1)[0]) from None

    @property
    def _temperature(self) -> float:
        if self.use_beam_search:
            return 0.0
        return 1.0 if self.temperature is None else self.temperature

    @property
    def beams(self) -> BeamOptions | None:
        """How to search, where a beam search is asked for."""
        if not self.use_beam_search:
            return None
        return BeamOptions(1.0 if self.length_penalty is None else self.length_penalty)

    @property
    def candidates(self) -> int | None:
        """How many answers to sample where they are more than are shown."""
        return None if self.best_of is None or self.best_of == (self.n or 1) else self.best_of

    def _check_beams(self) -> None:
        if not self.use_beam_search:
            if self.length_penalty not in (None, 1.0):
                raise ApiError(
                    "length_penalty has an effect only with use_beam_search; leave it out",
                    param="length_penalty",
                )
            return
        if self.stream:
            raise ApiError(
                "a beam search cannot be streamed: before its end nothing is certain; leave out stream or "
                "use_beam_search",
                param="stream",
            )
        if (self.n or 1) > MAX_BEAM_WIDTH:
            raise ApiError(
                f"n is the width of the beam and at most {MAX_BEAM_WIDTH}, got {self.n}", param="n"
            )
        if self.best_of is not None:
            raise ApiError(
                "best_of has no effect with use_beam_search, whose width is n; leave it out", param="best_of"
            )
        without_effect = {
            "temperature": self.temperature not in (None, 0.0, 1.0),
            "top_p": self.top_p not in (None, 1.0),
            "top_k": self.top_k not in (None, 0, -1),
            "min_p": bool(self.min_p),
            "seed": self.seed is not None,
            "stop": bool(self.stop),
            "min_tokens": bool(self.min_tokens),
        }
        for name, given in without_effect.items():
            if given:
                raise ApiError(
                    f"{name} has no effect on a beam search, which takes the likeliest tokens until the model ends "
                    "a hypothesis; leave it out",
                    param=name,
                )

    def _check_best_of(self) -> None:
        if self.best_of is None:
            return
        if self.best_of < (self.n or 1):
            raise ApiError(f"best_of is {self.best_of}, fewer than n, which is {self.n}", param="best_of")
        if self.candidates is not None and self.stream:
            raise ApiError(
                "best_of cannot be streamed: which answer is best is known at the end; leave out stream",
                param="stream",
            )
        if self.candidates is not None and self.temperature == 0:
            raise ApiError(
                "best_of has no effect at temperature 0, where all answers are the same; leave it out",
                param="best_of",
            )

    def extras(self) -> frozenset[str]:
        """Fields given that change what a model would say, beyond sampling."""
        given = set()
        if self.presence_penalty:
            given.add("presence_penalty")
        if self.frequency_penalty:
            given.add("frequency_penalty")
        if self.repetition_penalty not in (None, 1.0):
            given.add("repetition_penalty")
        if self.logit_bias:
            given.add("logit_bias")
        if self.response_format not in (None, {"type": "text"}):
            given.add("response_format")
        return frozenset(given)


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Any = None
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        """One text or list of token ids per prompt. Raises `ApiError` for anything else."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [clean(prompt)]
        if not isinstance(prompt, list) or not prompt:
            raise ApiError("prompt must be a text, a list of token ids, or a list of either", param="prompt")
        if _are_ids(prompt):
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise ApiError(
                f"{len(prompt)} prompts in one request; send {MAX_PROMPTS} at most", param="prompt"
            )
        out: list[str | list[int]] = []
        for item in prompt:
            if isinstance(item, str):
                out.append(clean(item))
            elif isinstance(item, list) and _are_ids(item):
                out.append(item)
            else:
                raise ApiError(
                    "prompt must be a text, a list of token ids, or a list of either", param="prompt"
                )
        return out

    def checked_sampling(self) -> Sampling:
        """Sampling, where everything asked for can be done."""
        if self.echo:
            raise ApiError("echo is not supported; leave it out", param="echo")
        if self.suffix:
            raise ApiError("suffix is not supported; leave it out", param="suffix")
        return self.sampling(COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens, self.logprobs)


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Any = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None

    def turns(self) -> list[dict[str, Any]]:
        """The messages with their content as text. Raises `ApiError` for content that is not text."""
        if not isinstance(self.messages, list) or not self.messages:
            raise ApiError("messages must be a list of at least one message", param="messages")
        return [_turn(message, f"messages[{i}]") for i, message in enumerate(self.messages)]

    def template_variables(self) -> dict[str, Any]:
        """What the chat template gets besides the messages."""
        variables = dict(self.chat_template_kwargs or {})
        for name in ("messages", "bos_token", "eos_token"):
            variables.pop(name, None)
        variables["add_generation_prompt"] = self.add_generation_prompt is not False
        if self.tools:
            variables["tools"] = self.tools
        return variables

    def checked_sampling(self) -> Sampling:
        """Sampling, where everything asked for can be done."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling(limit, (self.top_logprobs or 0) if self.logprobs else None)

    def extras(self) -> frozenset[str]:
        return super().extras() | (frozenset({"tools"}) if self.tools else frozenset())


class TokenizeBody(_Body):
    """`POST /tokenize`."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Any = None


def parse(kind: type[Body], raw: bytes) -> Body:
    """A body from its bytes. Raises `ApiError` that names the first field at fault."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(f"the body is not JSON: {what}", code="invalid_json") from None
    if not isinstance(content, dict):
        raise ApiError(f"the body must be a JSON object, not {type(content).__name__}")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"][:2])
        raise ApiError(f"{param}: {first['msg']}", param=param) from None


def token_ids(ids: Sequence[Any], vocab_size: int, param: str) -> list[int]:
    """`ids` where each is a token. Raises `ApiError`."""
    if not _are_ids(ids):
        raise ApiError(f"{param} must be a list of token ids", param=param)
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ApiError(f"{param} has token ids outside 0 to {vocab_size - 1}", param=param)
    return list(ids)


def clean(text: str) -> str:
    """`text` with U+FFFD for halves of surrogate pairs, which JSON can carry and UTF-8 cannot."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _are_ids(items: Any) -> bool:
    return isinstance(items, list) and set(map(type, items)) <= {int}


def _turn(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ApiError(f"{where} must be an object with role and content", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ApiError(f"{where}.role must be a text", param=f"{where}.role")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    if content is not None and not isinstance(content, str):
        raise ApiError(f"{where}.content must be a text or a list of parts", param=f"{where}.content")
    return {**message, "role": clean(role), "content": clean(content or "")}


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ApiError(f"{where}: only text is served, not {str(kind)[:40]!r}", param=where)
