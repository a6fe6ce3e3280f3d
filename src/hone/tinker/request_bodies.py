"""JSON bodies of requests of Tinker's API. Fields that are not listed are ignored."""

from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, Field

MOST_SAMPLES = 4096  # of one request
Count = Field(default=0, ge=0, le=1000)


class CreateSession(BaseModel):
    user_metadata: dict[str, Any] | None = None


class Heartbeat(BaseModel):
    session_id: str


class LoraSettings(BaseModel):
    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(BaseModel):
    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraSettings = LoraSettings()
    optimizer_config: dict[str, Any] = {}
    user_metadata: dict[str, Any] | None = None


class LoadWeights(BaseModel):
    """Loads into model_id, or makes a model from session_id and model_seq_id."""

    path: str
    optimizer: bool = True
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None


class GetInfo(BaseModel):
    model_id: str


class AdamSettings(BaseModel):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(BaseModel):
    model_id: str
    seq_id: int | None = None
    params: AdamSettings = Field(
        default=AdamSettings(), validation_alias=AliasChoices("adam_params", "optim_params")
    )


class SaveWeights(BaseModel):
    model_id: str
    seq_id: int | None = None
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveExternal(BaseModel):
    model_id: str
    path: str
    seq_id: int | None = None
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None


class SaveForSampler(BaseModel):
    model_id: str
    seq_id: int | None = None
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class CreateSamplingSession(BaseModel):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class SamplingSettings(BaseModel):
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = -1
    top_p: float = Field(default=1.0, gt=0, le=1)

    def split_stops(self, of_model: list[int]) -> tuple[list[int], list[str]]:
        """Return the token ids and the texts that end a completion; None asks for the model's."""
        if self.stop is None:
            return of_model, []
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        return [x for x in stops if isinstance(x, int)], [x for x in stops if isinstance(x, str)]


class PromptChunk(BaseModel):
    type: str = "encoded_text"
    tokens: list[int] = []


class PromptInput(BaseModel):
    chunks: list[PromptChunk]


class Sample(BaseModel):
    prompt: PromptInput
    sampling_params: SamplingSettings = SamplingSettings()
    sampling_session_id: str | None = None
    seq_id: int | None = None
    num_samples: int = Field(default=1, ge=1, le=MOST_SAMPLES)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Count
    topk_sample_logprobs: int = Count
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0

    def check_supported(self) -> None:
        """Raise ValueError for what this server does not compute."""
        for name in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
            if getattr(self, name):
                raise ValueError(f"{name}: this server does not compute it")

    def prompt_ids(self) -> list[int]:
        """Return the prompt's token ids. Raises ValueError for images and sound."""
        for chunk in self.prompt.chunks:
            if chunk.type != "encoded_text":
                raise ValueError(f"prompt: a chunk of type {chunk.type!r}; this model reads text")
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]


class WeightsInfo(BaseModel):
    tinker_path: str


class Ttl(BaseModel):
    ttl_seconds: int | None = None


class RetrieveFuture(BaseModel):
    request_id: str
