"""Text to token ids and back, and chats to token ids, on the `tokenizers` library alone.

Ids are those that `transformers` gives for the same files: the post-processor of tokenizer.json decides
whether BOS is added (`add_bos_token` of tokenizer_config.json is not read, as transformers 5 does not when
there is a tokenizer.json), and a chat gets no BOS but the one its template writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import BundleError, RequestError
from .chat_template import ChatTemplate, replacement_template
from .control_tokens import ControlTokens, Marks, Places
from .token_pieces import TokenPieces

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


class Tokenizer:
    """One model's tokenizer. Never changed once built, so many threads may use it at once.

    `vocab_size` is the largest token id + 1, which may differ from the width of the model's logits.
    `eos_token_ids` is every id that ends a turn: the union of what config.json, generation_config.json and
    the tokenizer name. `special_token_ids` are hidden by `skip_special_tokens`. `control_token_ids` are, by their
    text, the special tokens and those added ones that the chat template writes.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        special_tokens: Iterable[str] = (),
        eos_token_ids: Iterable[int] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        # Settings saved in a tokenizer.json would cut prompts silently.
        backend.no_truncation()
        backend.no_padding()
        _flag_special(backend, special_tokens)
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._pieces = TokenPieces(json.loads(_without_vocabulary(backend))["decoder"], backend.id_to_token)
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_token_id: int | None = None if bos_token is None else backend.token_to_id(bos_token)
        self.eos_token_ids = frozenset(eos_token_ids)
        self._chat_template = chat_template
        written = "" if chat_template is None else chat_template.literal_text
        self.control_token_ids: Mapping[str, int] = {
            token.content: token_id
            for token_id, token in added.items()
            # Added tokens that are mere spacing, such as "\n", are text.
            if (token.special or token.content in written) and not token.content.isspace()
        }
        self._control_tokens = ControlTokens(backend, self.control_token_ids)

    @classmethod
    def from_directory(cls, path: str | Path, *, chat_template: str | None = None) -> Tokenizer:
        """Read a bundle's or checkpoint's files; only tokenizer.json must exist. `chat_template` is the source of
        one that replaces the model's own. Raises `BundleError`.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise BundleError(f"{file} is missing; rebuild the bundle from a checkpoint that has a tokenizer")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise BundleError(f"{file} cannot be read: {error}") from error
        settings = _read_json(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in settings:  # transformers' rule for which of the two files counts
            settings |= _read_json(folder / "special_tokens_map.json")
        named = _named_tokens(settings)
        eos_token_ids = set(_config_eos_ids(folder))
        if (eos := backend.token_to_id(named.get("eos_token", ""))) is not None:
            eos_token_ids.add(eos)
        if chat_template is not None:
            template: ChatTemplate | None = replacement_template(chat_template, named)
        else:
            sources = _template_sources(folder, settings)
            template = ChatTemplate(sources, named) if sources else None
        return cls(
            backend,
            bos_token=named.get("bos_token"),
            special_tokens=[*named.values(), *_extra_tokens(settings)],
            eos_token_ids=eos_token_ids,
            chat_template=template,
        )

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._chat_template

    def special_ids_of(self, texts: Iterable[str]) -> tuple[int, ...]:
        """The ids of those `texts` that are special tokens, in order."""
        ids = {self._backend.token_to_id(text) for text in texts}
        return tuple(sorted(token_id for token_id in ids if token_id in self.special_token_ids))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt; control tokens written in `text` are control tokens.

        With `add_special_tokens` the tokenizer's rule decides what is added, but a BOS that `text` begins
        with is not doubled. Raises `RequestError(field="prompt")` for text that is not valid Unicode.
        """
        ids = self._encode(text, add_special_tokens, "prompt")
        if add_special_tokens and self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
            own = self._encode(text, False, "prompt")
            if len(own) < len(ids) and own[:1] == [self.bos_token_id]:
                del ids[0]
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        allow_control_tokens: bool = False,
    ) -> list[int]:
        """Token ids of a conversation: `apply_chat_template(..., tokenize=True)` of transformers.

        Control-token text anywhere in the arguments is plain text unless `allow_control_tokens`; control
        tokens are the special tokens and those added tokens that the template itself writes. Raises
        `RequestError` naming `messages`, `tools`, `chat_template_kwargs` or `continue_final_message`.
        """
        template = self._chat_template
        if template is None:
            raise RequestError(
                "messages: the model has no chat template; send a prompt to /v1/completions",
                field="messages",
                code="chat_template_missing",
            )

        def render(inputs: dict[str, Any]) -> str:
            return template.render(
                **inputs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )

        inputs: dict[str, Any] = {
            "messages": template.prepare(messages),
            "tools": tools,
            "template_kwargs": template_kwargs,
        }
        text = render(inputs)
        if allow_control_tokens:
            return self._encode(text, False, "messages")
        self._check_roles(inputs["messages"])
        marks = Marks.absent_from(inputs["messages"], tools, template_kwargs)
        marked_inputs = self._mark(inputs, marks)
        places = Places()
        if marked_inputs != inputs:
            text, places = self._control_tokens.settle(render(marked_inputs), marks, text)
        if self._control_tokens.is_safe(text, places):
            ids = self._encode(text, False, "messages")
            # More control tokens than were written: a normalizer or the model made one of other characters.
            if self._control_tokens.num_in_ids(ids) <= self._control_tokens.num_in_text(text):
                return ids
        return self._control_tokens.encode(text, places)

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, is_continuation: bool = False
    ) -> str:
        """The text of `token_ids`; ids outside the vocabulary have none.

        The same text as `tokenizers` decodes, except for byte tokens that are not valid UTF-8: there each
        broken character becomes one U+FFFD and valid neighbours stay, where `tokenizers` gives up the whole
        run. With `is_continuation` the text follows another: SentencePiece tokenizers keep its leading space.
        """
        if skip_special_tokens:
            token_ids = [token_id for token_id in token_ids if token_id not in self.special_token_ids]
        return self._pieces.join(token_ids, is_continuation=is_continuation).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token, special or not, adds to a text that has begun: maybe half a character."""
        return self._pieces.piece(token_id)

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD for parts of characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _encode(self, text: str, add_special_tokens: bool, field: str) -> list[int]:
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError:  # what the library makes of a string with lone surrogates
            raise RequestError(f"{field}: the text is not valid Unicode", field=field) from None

    def _check_roles(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """A template may build control tokens of roles (`'<|' + role + '|>'`), so none may be part of one."""
        for index, message in enumerate(messages):
            role = message["role"]
            if role not in _ROLES and self._control_tokens.is_part(role):
                raise RequestError(
                    f"messages[{index}].role {role[:64]!r} is part of a control token", field="messages"
                )

    def _mark(self, inputs: Mapping[str, Any], marks: Marks) -> dict[str, Any]:
        marked: dict[str, Any] = self._control_tokens.mark(inputs, marks)
        for message, original in zip(marked["messages"], inputs["messages"], strict=True):
            message["role"] = original["role"]
        return marked


def _without_vocabulary(backend: tokenizers.Tokenizer) -> str:
    """tokenizer.json with an empty model, which is quick to write and to read for any size of vocabulary."""
    shell = tokenizers.Tokenizer(tokenizers.models.BPE())
    if backend.decoder is not None:
        shell.decoder = backend.decoder
    return shell.to_str()


def _flag_special(backend: tokenizers.Tokenizer, contents: Iterable[str]) -> None:
    """Make special what a config names so and the vocabulary has; a token without an id has no meaning."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [
        content
        for content in dict.fromkeys(contents)
        if content and content not in special and backend.token_to_id(content) is not None
    ]
    backend.add_special_tokens([tokenizers.AddedToken(content, normalized=False) for content in missing])


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise BundleError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BundleError(f"{path} must hold a JSON object")
    return value


def _content(token: object) -> str | None:
    """The text of a token as configs write it: a string, or an AddedToken object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and whatever else a model names; templates read them under these names."""
    extra = settings.get("extra_special_tokens")
    candidates = {**settings, **(extra if isinstance(extra, dict) else {})}
    contents = {key: _content(value) for key, value in candidates.items() if key.endswith("_token")}
    return {key: content for key, content in contents.items() if content is not None}


def _extra_tokens(settings: Mapping[str, Any]) -> Iterator[str]:
    for key in ("extra_special_tokens", "additional_special_tokens"):
        value = settings.get(key)
        for token in value.values() if isinstance(value, dict) else value or ():
            if (content := _content(token)) is not None:
                yield content


def _config_eos_ids(folder: Path) -> Iterator[int]:
    config = _read_json(folder / "config.json")
    text_config = config.get("text_config")
    for source in (
        config,
        text_config if isinstance(text_config, dict) else {},
        _read_json(folder / "generation_config.json"),
    ):
        value = source.get("eos_token_id")
        yield from value if isinstance(value, list) else () if value is None else (value,)


def _template_sources(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Template files win over tokenizer_config.json, as in transformers."""
    files = {"default": folder / "chat_template.jinja"}
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        files[file.stem] = file
    sources = {name: file.read_text("utf-8") for name, file in files.items() if file.is_file()}
    if sources:
        return sources
    saved = settings.get("chat_template")
    if isinstance(saved, str):
        return {"default": saved}
    return {entry["name"]: entry["template"] for entry in saved or ()}
