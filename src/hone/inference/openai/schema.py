"""Request bodies of the OpenAI API. `answers.py` has the answers.

Every key of OpenAI or vLLM is one of three: supported (the fields here); refused, because it would
change the answer and is not supported (NEUTRAL); or without effect on the answer, such as `user`,
and then ignored like unknown keys.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    field_validator,
    model_validator,
)

from hone.records import Prompt, Sampling
from hone.text.structured_outputs import Form, Kind

NOTHING: tuple[Any, ...] = (None, False, [], {}, "")
NEUTRAL: dict[str, tuple[Any, ...]] = {  # unsupported keys with their neutral values
    **dict.fromkeys(
        (
            "guided_decoding_backend",
            "suffix",
            "prompt_logprobs",
            "functions",
            "function_call",
            "audio",
            "prediction",
            "use_beam_search",
            "truncate_prompt_tokens",
            "allowed_token_ids",
            "bad_words",
            "logits_processors",
            "documents",
            "continue_final_message",
            "add_special_tokens",
            "chat_template",
            "mm_processor_kwargs",
            "web_search_options",
            "prompt_embeds",
            "structural_tag",
            "guided_whitespace_pattern",
            "verbosity",
            "thinking_token_budget",
            "chat_template_file",
        ),
        NOTHING,
    ),
    "modalities": (None, ["text"]),
    "length_penalty": (None, 1, 1.0),
    "best_of": (None, 1),
    "add_generation_prompt": (None, True),
}


DRAW_KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "raw_logprobs",
)


def _as_json(schema: dict[str, Any] | str) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the schema of answers is not JSON: {error}") from None


def _keep_to_the_template(value: dict[str, Any] | None) -> dict[str, Any] | None:
    taken = {"self", "messages", "tools", "documents", "before", "add_generation_prompt"} & set(
        value or {}
    )
    if taken:
        raise ValueError(f"{', '.join(sorted(taken))} cannot be set here")
    return value


TemplateArguments = Annotated[dict[str, Any], AfterValidator(_keep_to_the_template)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


MAX_STOPS = 1024  # stop strings, or ids of stop tokens, of a request


class ChatMessage(BaseModel):
    """A message as clients write it; `text.messages` normalizes it before it is rendered."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[dict[str, Any]] | None = None


class Written(BaseModel):
    """Partial completion that the server is to continue."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int]

    @model_validator(mode="after")
    def _of_equal_length(self) -> "Written":
        if not len(self.ids) == len(self.logprobs) == len(self.versions):
            raise ValueError("ids, logprobs and versions are of different lengths")
        return self


class JsonSchema(BaseModel):
    """OpenAI's `json_schema` object; its schema is always enforced.

    The keys `name`, `description` and `strict` are ignored.
    """

    model_config = ConfigDict(extra="allow")
    json_schema: dict[str, Any] | bool = Field(alias="schema")


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError("json_schema: it goes with type json_schema, which needs it")
        return self


FORMS = {
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
}


class StructuredOutputs(BaseModel):
    """vLLM's structured outputs; exactly one field is set."""

    model_config = ConfigDict(extra="forbid")
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None


def refuse_ignored(extra: dict[str, Any] | None) -> None:
    """Raise ValueError for a key that would change the answer but is not supported on this route."""
    elsewhere = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    for key, value in (extra or {}).items():
        if value not in NEUTRAL.get(key, (value,)):
            raise ValueError(f"{key} = {value!r} is not supported by this server; leave it out")
        if key in elsewhere and key not in NEUTRAL and value not in NOTHING:
            raise ValueError(f"{key} = {value!r} is not supported by this route; leave it out")


class StreamOptions(BaseModel):
    include_usage: bool | None = None  # in a last chunk
    continuous_usage_stats: bool | None = None  # in every chunk


class Request(BaseModel):
    """Fields for sampling and for the content of the answer; null counts as absent."""

    model_config = ConfigDict(extra="allow")
    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: FiniteFloat | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)  # -1 and 0: all
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: FiniteFloat | None = Field(None, gt=0, le=1e6)
    presence_penalty: FiniteFloat | None = Field(None, ge=-1e6, le=1e6)
    frequency_penalty: FiniteFloat | None = Field(None, ge=-1e6, le=1e6)
    logit_bias: dict[int, Annotated[FiniteFloat, Field(ge=-1e6, le=1e6)]] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    timeout: float | None = Field(None, gt=0)  # seconds until it ends with the tokens it has
    n: int | None = Field(None, ge=1, le=1024)
    seed: int | None = None
    raw_logprobs: bool | None = None  # at temperature 1
    return_token_ids: bool | None = None
    return_token_logprobs: bool | None = (
        None  # plain numbers, beside or instead of the entries of `logprobs`
    )
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = (
        None  # these four are older spellings of structured_outputs
    )
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = None

    @field_validator("stop")
    @classmethod
    def _as_list(cls, value: str | list[str] | None) -> list[str]:
        strings = [value] if isinstance(value, str) else value or []
        return [string for string in strings if string]

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> "Request":
        refuse_ignored(self.model_extra)
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream = true")
        return self

    @property
    def top_logprob_count(self) -> int:
        """Return how many likeliest tokens to report per position."""
        raise NotImplementedError

    @property
    def has_form(self) -> bool:
        return self.requested_form() is not None

    def requested_form(self) -> Form | None:
        """Return the requested output format. Raises ValueError if there are several."""
        if not self.model_fields_set & FORMS:
            return None
        said = self.structured_outputs or StructuredOutputs.model_validate({})
        found = []
        if self.response_format is not None and self.response_format.type != "text":
            asked = self.response_format.json_schema
            found.append(Form("json", {"type": "object"} if asked is None else asked.json_schema))
        for schema in (said.json_, self.guided_json):
            if schema is not None:
                found.append(Form("json", _as_json(schema)))
        if said.json_object:
            found.append(Form("json", {"type": "object"}))
        kinds: tuple[tuple[Kind, Any], ...] = (
            ("regex", said.regex),
            ("choice", said.choice),
            ("grammar", said.grammar),
            ("regex", self.guided_regex),
            ("choice", self.guided_choice),
            ("grammar", self.guided_grammar),
        )
        found += [Form(kind, value) for kind, value in kinds if value is not None]
        if len(found) > 1:
            raise ValueError(
                "response_format, structured_outputs and guided_…: give only one output format"
            )
        return found[0] if found else None

    def build_sampling(self, max_tokens: int, seed: int, vocab_size: int) -> Sampling:
        """Return the sampling parameters. Raises ValueError for unknown token ids."""
        beyond = [
            i
            for i in [*(self.logit_bias or {}), *(self.stop_token_ids or [])]
            if not 0 <= i < vocab_size
        ]
        if beyond:
            raise ValueError(f"token id {beyond[0]} is not one of the model's: it has {vocab_size}")
        given = {name: value for name in DRAW_KEYS if (value := getattr(self, name)) is not None}
        given["top_k"] = max(given.get("top_k", 0), 0)
        bias = tuple((self.logit_bias or {}).items())
        return Sampling(
            max_tokens=max_tokens,
            seed=seed,
            logit_bias=bias,
            top_logprobs=self.top_logprob_count,
            **given,
        )


class NamedFunction(BaseModel):
    name: str


class ToolChoice(BaseModel):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Request):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    # Prompt and completion together; reduces max_tokens to what remains.
    max_total_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    return_routing: bool | None = None  # experts of the tokens (records.Completion)
    request_name: str | None = None  # its name in POST /progress
    conversation_ids: list[int] | None = (
        None  # token ids of the first turns, kept unless the template rewrites their text
    )
    # The number of messages they cover; the last is the assistant's.
    conversation_messages: int | None = Field(None, ge=1)
    so_far: list[Written] | None = None  # per choice: tokens generated elsewhere, to continue from
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None  # False: at most one call per answer
    reasoning_effort: str | None = None  # passed to templates that know it
    chat_template_kwargs: TemplateArguments | None = None

    @model_validator(mode="after")
    def _fit_together(self) -> "ChatRequest":
        if self.so_far is not None and (
            len(self.so_far) != (self.n or 1) or self.stop or self.top_logprobs
        ):
            raise ValueError("so_far is for each of n, without stop and top_logprobs")
        if self.stream and (self.so_far is not None or self.request_name or self.return_routing):
            raise ValueError(
                "so_far, request_name and return_routing are for answers in one piece, without stream"
            )
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        if self.must_call:
            self._check_tool_choice()
        return self

    def _check_tool_choice(self) -> None:
        functions = [tool.get("function") for tool in self.tools or []]
        names = [one.get("name") if isinstance(one, dict) else None for one in functions]
        if not all(isinstance(name, str) for name in names):
            raise ValueError("tools: each is {type: function, function: {name, parameters}}")
        if not names:
            raise ValueError("tool_choice: there are no tools to call")
        choice = self.tool_choice
        if isinstance(choice, ToolChoice) and choice.function.name not in names:
            raise ValueError(
                f"tool_choice: {choice.function.name!r} is not one of the tools {names}"
            )
        if self.requested_form() is not None:
            raise ValueError(
                "tool_choice asks for a call of a tool, and another form of answers is given too"
            )

    @property
    def has_form(self) -> bool:
        return super().has_form or self.must_call

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, ToolChoice)

    def callable_tools(self) -> list[dict[str, Any]]:
        """Return the tools from which the model must choose when a tool call is forced."""
        if isinstance(self.tool_choice, ToolChoice):
            return [
                one
                for one in self.tools or []
                if one["function"]["name"] == self.tool_choice.function.name
            ]
        return self.tools or []

    @property
    def top_logprob_count(self) -> int:
        return self.top_logprobs or 0

    def build_prompt(self) -> Prompt:
        messages = [message.model_dump() for message in self.messages]
        tools = None if self.tool_choice == "none" else self.tools or None
        covered = self.conversation_messages or 0
        effort = (
            {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        )
        return Prompt(
            messages,
            tools,
            self.conversation_ids,
            covered,
            {**effort, **(self.chat_template_kwargs or {})},
        )


class TokensRequest(ChatRequest):
    """Chat request with the prompt as token ids; `messages` only serve to number tool calls."""

    tokens: list[int] = Field(min_length=1)


class CompletionRequest(Request):
    """One or more texts or token id lists to continue."""

    prompt: str | list[str] | Ids | list[Ids]
    # As in OpenAI's API; 0 with echo returns the prompt's logprobs.
    max_tokens: int | None = Field(16, ge=0)
    # Number of likeliest tokens beside the sampled one.
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    add_special_tokens: bool = True  # tokens that the tokenizer puts before a text, such as bos

    @model_validator(mode="after")
    def _fit_together(self) -> "CompletionRequest":
        if not self.prompt:
            raise ValueError("prompt: it is empty")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens = 0 needs echo = true: there is nothing else to answer")
        if self.echo and self.stream and self.logprobs is not None:
            raise ValueError("echo with logprobs is for answers in one piece, without stream")
        return self

    @property
    def top_logprob_count(self) -> int:
        return self.logprobs or 0

    def list_prompts(self) -> list[str | list[int]]:
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt  # type: ignore[list-item,return-value]


class TokenizeRequest(BaseModel):
    """Tokenize a text (`prompt`), or a conversation (`messages`) by the chat template."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True  # of a text; a chat template writes its own
    return_token_strs: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> "TokenizeRequest":
        refuse_ignored(self.model_extra)
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(BaseModel):
    model: str | None = None
    tokens: list[int]
