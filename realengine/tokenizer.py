"""Text to token ids and back, and a model's own chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realengine.detokenize import Detokenizer
from serving.errors import UsageError


class Tokenizer:
    """A `tokenizers` back end with what `tokenizer_config.json` adds to it.

    `bos_token_id` is put before every prompt where the back end does not do so itself.
    """

    def __init__(
        self,
        backend: Any,
        *,
        template: str | None = None,
        bos_token: str = "",
        eos_token: str = "",
        bos_token_id: int | None = None,
    ) -> None:
        self.backend = backend
        self.template = template
        self.bos_token, self.eos_token = bos_token, eos_token
        self._bos_token_id = bos_token_id
        self._compiled: Any = None

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """From `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.

        Raises `UsageError` when the first is missing or malformed.
        """
        from tokenizers import Tokenizer as Backend

        file = folder / "tokenizer.json"
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise UsageError(f"{file}: cannot be read as a tokenizer ({error})") from None
        config: dict[str, Any] = {}
        if (folder / "tokenizer_config.json").is_file():
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = config.get("chat_template")
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template}
            template = named.get("default")
        if (folder / "chat_template.jinja").is_file():
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        return cls(
            backend,
            template=template,
            bos_token=_content(config.get("bos_token")),
            eos_token=_content(config.get("eos_token")),
        )

    @property
    def vocab_size(self) -> int:
        """Token ids run below this."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with the model's own beginning of text unless told otherwise."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._bos_token_id is not None and ids[:1] != [self._bos_token_id]:
            ids = [self._bos_token_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str:
        """How a single token reads by itself, special or not."""
        return self.decode([token_id], skip_special_tokens=False)

    def detokenizer(self, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """Turns the tokens that follow `prompt` into text, piece by piece."""
        return Detokenizer(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens), prompt)

    def chat(self, messages: Sequence[dict[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation in the model's own format, ready for the assistant's answer.

        `variables` reach the template (tools, enable_thinking, …). Raises `UsageError` when the model has no template
        or the template refuses the messages.
        """
        return self.encode(self.render(messages, **variables), add_special_tokens=False)

    def render(self, messages: Sequence[dict[str, Any]], **variables: Any) -> str:
        """The text of a conversation in the model's own format."""
        from jinja2.exceptions import TemplateError

        if self.template is None:
            raise UsageError("this model has no chat template; use completions instead")
        variables.setdefault("add_generation_prompt", True)
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self.template)
            return str(
                self._compiled.render(
                    messages=list(messages), bos_token=self.bos_token, eos_token=self.eos_token, **variables
                )
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise UsageError(f"the model's chat template refuses these messages: {error}") from None


def _environment() -> Any:
    import datetime

    from jinja2.exceptions import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, indent=options.get("indent")
    )
    return environment


def _content(token: object) -> str:
    if isinstance(token, dict):
        return str(token.get("content", ""))
    return token if isinstance(token, str) else ""
