"""A language model on transformers' own modules, behind the interface of `Transformer`.

    tokens_T, positions_T ─► transformers' decoder (B = 1) ─┬─ its layers' q, k, v ─► attend(layer, qkv, heads) ─┐
                                                            └───────────────────────────────────────────────────┴─►

Its attention is Hone's: the function registered here passes q, k and v, after norms and rotation, to
the attention object of the pass, as `Transformer` does. So packed sequences, shared prompts and the
KV cache work as for Hone's own models. Linears of the layers become Hone's, for adapters.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hone.models.attention_layouts import AttentionOptions, Heads
from hone.models.families.borrowed import BorrowedSpec
from hone.models.language_model import LanguageModel
from hone.models.layers import Attention, Linear
from hone.models.spec import ModelSpec

NAME = "hone"


class BorrowedModel(LanguageModel):
    """A causal language model of transformers."""

    spec: BorrowedSpec

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        from transformers import AutoConfig, AutoModelForCausalLM

        _register_attention()
        assert isinstance(spec, BorrowedSpec)
        keys = {key: value for key, value in spec.config.items() if key != "model_type"}
        config = AutoConfig.for_model(spec.config["model_type"], **keys)
        whole = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=NAME, dtype=torch.get_default_dtype()
        )
        decoder = whole.get_decoder()
        self.blocks = decoder.layers
        for layer in self.blocks:
            _replace_linears(layer)
        self.embed = whole.get_input_embeddings()
        head = whole.get_output_embeddings()
        self.head = None if spec.tie_word_embeddings else head
        self.whole = whole
        # Granite divides its logits; here the hidden states, which gives the same.
        self.logits_scaling = float(getattr(decoder.config, "logits_scaling", None) or 1.0)
        whole.gradient_checkpointing_enable({"use_reentrant": False})
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
        decoder = self.whole.get_decoder()
        for (
            layer
        ) in self.blocks:  # each of them looks at its own `training`, its parts stay as they are
            layer.training = self.recomputes
        out = decoder(
            input_ids=tokens_T[None],
            position_ids=positions_T[None],
            use_cache=False,
            attend=attend,
        )
        hidden_TD: Tensor = out.last_hidden_state[0] / self.logits_scaling
        return hidden_TD if keep_N is None else hidden_TD.index_select(0, keep_N)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Draw new weights as transformers does, from the generator's seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator.initial_seed())
            self.whole.init_weights()


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


def attend_heads(
    module: nn.Module,
    query_1HTE: Tensor,
    key_1KTE: Tensor,
    value_1KTE: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Attention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers: pass rotated q, k and v to the attention of the pass."""
    q, k, v = (x[0].transpose(0, 1) for x in (query_1HTE, key_1KTE, value_1KTE))
    options = AttentionOptions(scaling, sliding_window, softcap, s_aux)
    heads = Heads(q.shape[1], None, None, 0.0, None, options.without_defaults(q.shape[2]))
    out_TA = attend(module.layer_idx, torch.cat([q, k, v], 1), heads)  # type: ignore[arg-type]
    return out_TA.view(1, len(q), q.shape[1], -1), None


def _register_attention() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attend_heads)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
