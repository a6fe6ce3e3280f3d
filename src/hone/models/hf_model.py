"""A language model on transformers' own modules, behind the interface of `LanguageModel`.

    tokens_T, positions_T ─► transformers' decoder (B = 1) ─┬─ its layers' q, k, v ─► attend(layer, qkv, heads) ─┐
                                                            └───────────────────────────────────────────────────┴─►

Its attention is Hone's: the function registered here passes q, k and v, after norms and rotation, to
the attention object of the pass, as `Transformer` does. So packed sequences, shared prompts and the
KV cache work as for Hone's own models. Linears of the layers become Hone's, for adapters.
"""

import copy
import logging
from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hone.kernels import gpu
from hone.kernels.delta_plan import DeltaHeads
from hone.kernels.norm import offset_norm
from hone.models.attention_layouts import (
    FLASH_HEAD_SIZE,
    AttentionOptions,
    Heads,
    PackedAttention,
)
from hone.models.families.hf_spec import ATTENTION_KINDS, HFSpec, make_text_config
from hone.models.language_model import LanguageModel
from hone.models.layers import Attention, Linear
from hone.models.mixers import Mixer, find_mixers, make_mixer
from hone.models.spec import ModelSpec

log = logging.getLogger("hone")
ATTENTION_NAME = "hone"  # of the attention function in transformers
NORM_OFFSETS = (0.0, 1.0)  # that RMS norms add to their weights
CHECKED_TOKENS = 8  # of each sequence in `refuse_unsupported`
# Between equal rows of two passes, as a share of the largest number; bfloat16 rounds to 0.4 %.
MAX_RELATIVE_DIFFERENCE = 0.02
# Arguments that transformers passes to attention functions and that change nothing here.
WITHOUT_EFFECT = {
    "dropout",
    "position_ids",
    "use_cache",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "is_causal",
    "past_key_values",
}


class _Pass:
    """The attention of the latest pass, for models that do not hand arguments down to their layers."""

    attend: Attention | None = None
    attention_index: dict[int, int]  # by layer: its index among the layers with attention
    heads: tuple[int, int]  # number and size of the key/value heads in the cache


class _CheckedAttention:
    """Attention that records number and size of the key/value heads."""

    def __init__(self, attention: PackedAttention) -> None:
        self.attention = attention
        self.sizes: list[tuple[int, int]] = []
        self.mix_sequences = attention.mix_sequences
        self.mix_delta = attention.mix_delta

    def __call__(self, layer: int, qkv_TNE: Tensor, heads: Heads) -> Tensor:
        self.sizes.append(((qkv_TNE.shape[1] - heads.H) // 2, qkv_TNE.shape[2]))
        return self.attention(layer, qkv_TNE, heads)


class _TrialAttention:
    """Attention that returns zeros and records what decoding on a GPU has to support."""

    def __init__(self) -> None:
        self.has_kernels = True
        self.has_caps = False

    def __call__(self, layer: int, qkv_TNE: Tensor, heads: Heads) -> Tensor:
        options = heads.options or AttentionOptions()
        has_sinks = options.sinks_H is not None
        self.has_kernels &= gpu.takes_heads(qkv_TNE.shape[2]) and not has_sinks
        self.has_caps |= options.cap is not None
        return qkv_TNE.new_zeros(len(qkv_TNE), heads.H * qkv_TNE.shape[2])

    def mix_sequences(self, layer: int, x_TD: Tensor, mixer: Mixer) -> Tensor:
        self.has_kernels = False
        return torch.zeros_like(x_TD)

    def mix_delta(self, layer: int, projected_TO: Tensor, heads: DeltaHeads) -> Tensor:
        raise TypeError("transformers' modules have mixers of their own")


class HFModel(LanguageModel):
    """A causal language model of transformers."""

    has_other_forms = True
    spec: HFSpec

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        from transformers import AutoModelForCausalLM

        _register_attention()
        assert isinstance(spec, HFSpec)
        try:
            whole = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                make_text_config(spec.config),
                attn_implementation=ATTENTION_NAME,
                dtype=torch.get_default_dtype(),
            )
        except (KeyError, ValueError) as error:
            first = str(error).splitlines()[0]
            kind = spec.config["model_type"]
            own = f"{spec.own_reason}; " if spec.own_reason else ""
            raise ValueError(
                f"{own}a {kind} model is not supported on transformers' modules: {first}"
            ) from error
        decoder = whole.get_decoder()
        kind = type(whole).__name__
        if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
            raise ValueError(f"{kind} is not supported: its layers are not a list named layers")
        self.blocks = decoder.layers
        self.current = _Pass()
        with_attention = [i for i, kind in enumerate(spec.layer_kinds) if kind in ATTENTION_KINDS]
        self.current.heads = (spec.num_key_value_heads, spec.head_dim)
        self.current.attention_index = {layer: i for i, layer in enumerate(with_attention)}
        mixers = [mixer for layer in self.blocks for mixer in find_mixers(layer)]
        if len(mixers) != spec.mixer_layers:
            raise ValueError(
                f"{kind} is not supported: {len(mixers)} mixers of tokens beside attention were found in "
                f"{spec.mixer_layers} layers"
            )
        for layer in self.blocks:
            _replace_linears(layer)
        _use_norm_kernels(decoder)
        self.mixers = [make_mixer(module) for module in mixers]
        for i, (module, mixer) in enumerate(zip(mixers, self.mixers, strict=True)):
            module.forward = partial(_mix_tokens, self.current, i, mixer)
        self.embed = whole.get_input_embeddings()
        head = whole.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise ValueError(f"{kind} is not supported: its head has a bias")
        self.head = None if spec.tie_word_embeddings else head
        self.whole = whole
        # Granite divides its logits, Cohere and Falcon-H1 multiply them; here the hidden states, with the same result.
        divisor = getattr(decoder.config, "logits_scaling", None) or 1.0
        factors = (
            getattr(decoder.config, name, None) for name in ("logit_scale", "lm_head_multiplier")
        )
        self.logit_factor = prod(float(factor or 1.0) for factor in factors) / divisor
        for module in decoder.modules():
            module.__dict__["hone_pass"] = self.current
        # Renamed in transformers 5.23.
        enable = getattr(whole, "activation_checkpointing_enable", None)
        if whole.supports_gradient_checkpointing:
            (enable or whole.gradient_checkpointing_enable)({"use_reentrant": False})
        whole.eval()

    @classmethod
    @cache
    def weight_names(cls, spec: ModelSpec) -> dict[str, list[str]]:
        """Return the parameters and saved buffers, and the names that transformers gives them."""
        with torch.device("meta"):
            model = cls(spec)
        theirs = {id(tensor): name for name, tensor in _saved_tensors(model.whole)}
        return {name: [theirs[id(tensor)]] for name, tensor in _saved_tensors(model)}

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attention, keep_N: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states after the final norm, T x D, or N x D with `keep_N`."""
        self.current.attend = attend
        for layer in self.blocks:  # not its parts, which may have dropout
            # Checkpointing reads the random state, which no CUDA graph can do.
            layer.training = self.recomputes and torch.is_grad_enabled()
        keys = {"position_ids": positions_T[None], "use_cache": False, "attend": attend}
        out = self.whole.get_decoder()(input_ids=tokens_T[None], **keys)
        hidden_TD: Tensor = out.last_hidden_state[0] * self.logit_factor
        return hidden_TD if keep_N is None else hidden_TD.index_select(0, keep_N)

    @property
    def stays_on_device(self) -> bool:
        return self._trial is not None

    @property
    def prefills_on_device(self) -> bool:
        # Torch's flash attention, which captured passes call, takes no larger heads.
        has_flash = self.spec.head_dim <= FLASH_HEAD_SIZE
        return self._trial is not None and not self._trial.has_caps and has_flash

    @cached_property
    @torch.no_grad()
    def _trial(self) -> _TrialAttention | None:
        """Attention of a pass over two tokens, if the pass made the host wait for nothing, else None.

        Other threads must not wait for the GPU meanwhile.
        """
        weight = self.embed.weight
        if not gpu.has_kernels(weight):
            return None
        attention = _TrialAttention()
        ids, positions = torch.arange(4, device=weight.device).chunk(2)
        self(ids, positions, attention)  # tables are made once
        torch.cuda.synchronize()
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self(ids, positions, attention)
        except RuntimeError as error:
            log.info(
                "Decode steps of %s are not CUDA graphs: %s",
                type(self.whole).__name__,
                str(error).splitlines()[0],
            )
            return None
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return attention if attention.has_kernels else None

    def read_converted(self, directory: Path) -> dict[str, Tensor]:
        """Return weights as transformers reads them, which for example stacks a block's experts."""
        from transformers import AutoModelForCausalLM

        read: Any = AutoModelForCausalLM.from_pretrained
        whole, found = read(
            directory,
            dtype=self.embed.weight.dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if found[kind]:
                name = min(map(str, found[kind]))
                raise ValueError(f"{directory}: {kind.replace('_keys', '')} tensor: {name}")
        return dict(_saved_tensors(whole))

    def convert_for_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors in the form in which transformers saves them."""
        from transformers.core_model_loading import revert_weight_conversion

        found: dict[str, Tensor] = revert_weight_conversion(self.whole, tensors)
        return found

    @torch.no_grad()
    def refuse_unsupported(self) -> None:
        """Raise ValueError if packed sequences are not independent or logits differ from transformers'.

        A mixer other than attention lets a sequence see the one before it; a head may have more
        than a weight; some layers may have heads of another number or size.
        """
        kind = type(self.whole).__name__
        try:
            self._check_pass(kind)
            if self.embed.weight.is_cuda:
                _ = self._trial  # now, while no other thread uses the GPU
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise ValueError(
                f"{kind} is not supported on transformers' modules: {type(error).__name__}, {first}"
            ) from error

    def _check_pass(self, kind: str) -> None:
        device = self.embed.weight.device
        attention = PackedAttention([CHECKED_TOKENS] * 2, device)
        ids = torch.arange(3 * CHECKED_TOKENS, device=device) % self.spec.vocab_size
        first, other, second = ids.split(CHECKED_TOKENS)
        positions = attention.token_positions()
        attend = _CheckedAttention(attention)
        one = self(torch.cat([first, second]), positions, attend)
        two = self(torch.cat([other, second]), positions, attend)
        if _differs(one[CHECKED_TOKENS:], two[CHECKED_TOKENS:]):
            raise ValueError(
                f"{kind} is not supported on transformers' modules: a packed sequence sees the one before it"
            )
        own = (self.spec.num_key_value_heads, self.spec.head_dim)
        if attend.sizes != [own] * 2 * self.spec.attention_layers:
            found = ", ".join(f"{heads} of {size}" for heads, size in sorted(set(attend.sizes)))
            raise ValueError(
                f"{kind} is not supported on transformers' modules: {self.spec.attention_layers} layers must attend "
                f"with at most {own[0]} key/value heads of {own[1]}, found {found or 'none'}"
            )
        keys = {"position_ids": positions[None], "use_cache": False, "attend": attend}
        theirs = self.whole(input_ids=torch.cat([other, second])[None], **keys).logits[0]
        if _differs(self.compute_logits(two), theirs):
            raise ValueError(
                f"{kind} is not supported on transformers' modules: its logits are not products with its head's weight"
            )

    @property
    @torch.no_grad()
    def state_bytes(self) -> int:
        token_11D = self.embed.weight.new_zeros(1, 1, self.spec.hidden_size)
        return sum(mixer(token_11D, None)[1].nbytes for mixer in self.mixers)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Draw new weights as transformers does, from the generator's seed."""
        device = self.embed.weight.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(generator.initial_seed())
            self.whole.init_weights()


def _differs(one: Tensor, two: Tensor) -> bool:
    """Return True if two tensors differ by more than rounding, or are not finite."""
    largest = float(one.float().abs().max())
    return not float((one.float() - two.float()).abs().max()) <= MAX_RELATIVE_DIFFERENCE * largest


def _saved_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers that a checkpoint has, each once."""
    saved = module.state_dict(keep_vars=True).keys()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in saved:
            yield name, tensor


def _replace_linears(layer: nn.Module) -> None:
    """Replace nn.Linear by Hone's, which can have an adapter, with the same weights."""
    for module in list(layer.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                own = Linear.__new__(Linear)
                nn.Module.__init__(own)
                own.weight = child.weight  # type: ignore[assignment]
                own.bias, own.delta = child.bias, None
                setattr(module, name, own)


def _use_norm_kernels(decoder: nn.Module) -> None:
    """Let RMS norms of transformers use Hone's kernel on a GPU without gradients.

    A module is taken for an RMS norm by its name, a weight and an epsilon, and if its results are
    those of one.
    """
    offsets: dict[tuple[type, int, float], float | None] = {}
    for module in list(decoder.modules()):
        weight = getattr(module, "weight", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        is_named = type(module).__name__.endswith("RMSNorm")
        if not (is_named and isinstance(weight, nn.Parameter) and isinstance(eps, float)):
            continue
        kind = (type(module), len(weight), eps)
        if kind not in offsets:
            offsets[kind] = _find_norm_offset(module, eps)
        offset = offsets[kind]
        if offset is not None:
            module.forward = partial(_normalize, module, module.forward, offset, eps)


@torch.no_grad()
def _find_norm_offset(module: nn.Module, eps: float) -> float | None:
    """Return what a module adds to its weight as an RMS norm over the last dimension; None: it is none."""
    trial = copy.deepcopy(module).to_empty(device="cpu").float()
    generator = torch.Generator("cpu").manual_seed(0)
    weight: Tensor = trial.weight  # type: ignore[assignment]
    # The model is built under another default device and dtype.
    weight.copy_(torch.rand(weight.shape, generator=generator, device="cpu", dtype=torch.float32))
    x_TD = torch.randn(3, *weight.shape, generator=generator, device="cpu", dtype=torch.float32)
    try:
        found = trial(x_TD)
    except TypeError:  # it takes other inputs, such as a gate
        return None
    for offset in NORM_OFFSETS:
        if torch.allclose(found, offset_norm(x_TD, weight, offset, eps), atol=1e-5):
            return offset
    return None


def _normalize(
    module: nn.Module, forward: Callable[..., Tensor], offset: float, eps: float, x: Tensor
) -> Tensor:
    """Forward of an RMS norm: the kernel on a GPU without gradients, else the module's own."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    if not gpu.takes(x) or weight.dtype != x.dtype:
        return forward(x)
    from hone.kernels.gpu import row_kernels

    flat_TD = x.reshape(-1, x.shape[-1])
    return row_kernels.add_branch(flat_TD, None, None, 1.0, weight, offset, eps)[1].view(x.shape)


def attend_heads(
    module: nn.Module,
    query_1HTE: Tensor,
    key_1KTE: Tensor,
    value_1KTE: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Attention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers: pass rotated q, k and v to the attention of the pass.

    Raises TypeError for arguments with another meaning than those here.
    """
    unknown = {key for key, value in others.items() if value is not None} - WITHOUT_EFFECT
    if unknown:
        raise TypeError(f"attention argument {min(unknown)} is not supported")
    current: _Pass = module.__dict__["hone_pass"]
    attend = attend or current.attend
    assert attend is not None
    q, k, v = (x[0].transpose(0, 1) for x in (query_1HTE, key_1KTE, value_1KTE))
    scale = q.shape[2] ** -0.5 if scaling is None else scaling
    q, k, v_TKE = (_fit_heads(x, *current.heads) for x in (q, k, v))
    options = AttentionOptions(scale, sliding_window, softcap, s_aux)
    heads = Heads(q.shape[1], None, None, 0.0, None, options.without_defaults(q.shape[2]))
    layer = current.attention_index[module.layer_idx]  # type: ignore[index]
    out_TA = attend(layer, torch.cat([q, k, v_TKE], 1), heads)
    return out_TA.view(1, *q.shape)[..., : v.shape[2]], None


def _fit_heads(x_TKE: Tensor, count: int, size: int) -> Tensor:
    """Return key or value heads (or queries) in the number and size that the cache has.

    Heads are repeated, as each serves several queries; zeros at their end change no product.
    """
    _, found, own_size = x_TKE.shape
    if own_size < size:
        x_TKE = nn.functional.pad(x_TKE, (0, size - own_size))
    return x_TKE.repeat_interleave(count // found, 1) if found < count else x_TKE


def _mix_tokens(
    current: _Pass, index: int, mixer: Mixer, hidden_states: Tensor, **others: Any
) -> Tensor:
    """Forward of a mixer in a pass: hand it to the pass, which knows the sequences."""
    attend: Attention | None = others.get("attend") or current.attend
    assert attend is not None
    return attend.mix_sequences(index, hidden_states[0], mixer)[None]


def _register_attention() -> None:
    from transformers import AttentionInterface

    # Without a mask function of this name transformers makes no masks.
    AttentionInterface.register(ATTENTION_NAME, attend_heads)
