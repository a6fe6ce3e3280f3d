"""Say on which cards a command fits, and which keys would make it fit a smaller one. Imports no torch."""

from collections.abc import Callable, Iterator
from itertools import accumulate

from hone.config.base import Config
from hone.config.lora_config import LoRAConfig
from hone.config.rl_config import RLConfig, TrainerConfig
from hone.config.sft_config import SFTConfig
from hone.models.spec import ModelSpec
from hone.trainer.memory_plan import GIB, SMALLER_TOKENS, Need, choose_memory, estimate_need

# What cards of these sizes in GB have, in GiB, as their drivers report it.
CARD_GIB = {16: 15.6, 24: 23.6, 32: 31.3, 48: 47.4, 80: 79.1, 141: 139.8}


def fit_lines(config: Config, spec: ModelSpec, itemsize: int) -> list[str]:
    """Return a line on the cards that a command fits, and one on how it would fit a smaller card."""
    needs = {size: need_on(config, spec, itemsize, size) for size in CARD_GIB}
    fitting = {size: need for size, need in needs.items() if need and need.fits(CARD_GIB[size])}
    smaller = [size for size, need in needs.items() if need and size not in fitting]
    lines = []
    if fitting:
        lines.append(
            "fits " + ", ".join(_describe_card(need, size) for size, need in fitting.items())
        )
    if smaller:
        least = needs[smaller[-1]]
        assert least is not None
        lines.append(
            f"does not fit {', '.join(map(str, smaller))} GB: needs {least.least_bytes / GIB:.1f} GiB"
        )
    cures: dict[str, str] = {}
    for size in reversed(smaller):
        if (found := find_cure(config, spec, itemsize, size)) is not None:
            keys, less = found
            cures[" ".join(keys)] = f"would fit {size} GB ({less.least_bytes / GIB:.1f} GiB) with"
    return lines + [f"{words} {keys}" for keys, words in cures.items()]


def need_on(config: Config, spec: ModelSpec, itemsize: int, size: int) -> Need | None:
    """Return what a command needs on a card, with the micro-batches that "auto" chooses there."""
    chosen = choose_memory(config, spec, itemsize, int(CARD_GIB[size] * GIB))
    return estimate_need(chosen, spec, itemsize)


def _describe_card(need: Need, size: int) -> str:
    at_once = need.sequences_at_once(CARD_GIB[size])
    room = f", {at_once} sequences at once" if at_once else ""
    return f"{size} GB ({need.least_bytes / GIB:.1f} GiB{room})"


Cure = tuple[str, Callable[[Config], Config]]


def find_cure(
    config: Config, spec: ModelSpec, itemsize: int, size: int
) -> tuple[list[str], Need] | None:
    """Return the fewest further keys, in order of their cost in speed, that make a command fit a card.

    Returns:
        The words of the command line, and what the command then needs; None if they do not suffice.
    """

    def apply(cures: list[Cure]) -> Need | None:
        changed = list(accumulate(cures, lambda before, cure: cure[1](before), initial=config))[-1]
        return need_on(changed, spec, itemsize, size)

    chosen: list[Cure] = []
    for cure in _list_cures(config):
        chosen.append(cure)
        need = apply(chosen)
        if need is not None and need.fits(CARD_GIB[size]):
            for one in chosen[:-1]:  # those that are not needed after all
                rest = [other for other in chosen if other is not one]
                less = apply(rest)
                if less is not None and less.fits(CARD_GIB[size]):
                    chosen, need = rest, less
            return [words for words, _ in chosen], need
    return None


def _list_cures(config: Config) -> Iterator[Cure]:
    """Yield (words of the command line, change), those that cost least first."""
    if isinstance(config, RLConfig):
        prefix = "--trainer."
        section: TrainerConfig | SFTConfig = config.trainer
    elif isinstance(config, SFTConfig):
        prefix, section = "--", config
    else:
        return

    def change(**keys: object) -> Callable[[Config], Config]:
        def apply(before: Config) -> Config:
            if isinstance(before, RLConfig):
                trainer = before.trainer.model_copy(update=keys)
                return before.model_copy(update={"trainer": trainer})
            return before.model_copy(update=keys)

        return apply

    def change_section(name: str, **keys: object) -> Callable[[Config], Config]:
        def apply(before: Config) -> Config:
            own = before.trainer if isinstance(before, RLConfig) else before
            section = getattr(own, name)
            if section is None:  # a key of it has no effect without the section
                return before
            return change(**{name: section.model_copy(update=keys)})(before)

        return apply

    if section.activation_checkpointing is False:
        yield f"{prefix}activation-checkpointing", change(activation_checkpointing=True)
    if isinstance(section, TrainerConfig) and section.micro_batch_tokens:
        words = f"{prefix}micro-batch-tokens {SMALLER_TOKENS[-1]}"
        yield words, change(micro_batch_tokens=SMALLER_TOKENS[-1])
    if isinstance(config, SFTConfig) and (config.data.micro_batch_size or 1) > 1:
        data = config.data.model_copy(update={"micro_batch_size": 1})
        yield "--data.micro-batch-size 1", change(data=data)
    yield from _list_state_cures(prefix, section, change, change_section)
    if section.lora is not None or section.optim.type == "adamw":
        if isinstance(config, RLConfig) and (section.lora is None or section.lora.keeps_copy):
            yield f"{prefix}lora.no-merge", change_section("lora", merge=False)
        if section.lora is None or section.lora.base_bits == 16:
            yield f"{prefix}lora.base-bits 8", change_section("lora", base_bits=8)


def _list_state_cures(
    prefix: str,
    section: TrainerConfig | SFTConfig,
    change: Callable[..., Callable[[Config], Config]],
    change_section: Callable[..., Callable[[Config], Config]],
) -> Iterator[Cure]:
    """Yield the cures that shrink the optimizer's state of all weights."""
    if section.lora is not None:
        return
    if section.optim.type == "adamw" and section.optim.state_dtype != "bfloat16":
        yield f"{prefix}optim.state-dtype bfloat16", change_section("optim", state_dtype="bfloat16")
    if not section.optim.offload:
        yield f"{prefix}optim.offload", change_section("optim", offload=True)
    if section.optim.type == "adamw":
        yield f"{prefix}lora.rank 16", change(lora=LoRAConfig(rank=16))
