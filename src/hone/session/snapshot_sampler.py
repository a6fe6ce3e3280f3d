"""Sample from snapshots of a session's weights.

frozen base ─ shared by trainer and engine ─┬─ snapshot 1: an adapter      (LoRA)
                                            └─ snapshot 2: another one
copy of all weights ─ an engine of its own                                 (full fine-tuning)
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hone.engine.engine import Engine
from hone.models.weight_proof import score_sequence
from hone.records import Completion, GenerateRequest, Sampling


class SnapshotSampler:
    """Sampler of fixed weights; later optimizer steps do not change it.

    Attributes:
        adapter: name of its adapter in the engine; None: the engine's own weights.
        version: number of optimizer steps before the snapshot.
    """

    def __init__(
        self, engine: Engine, adapter: str | None, stop_ids: Sequence[int], version: int
    ) -> None:
        self.engine = engine
        self.adapter = adapter
        self.stop_ids = frozenset(stop_ids)
        self.version = version

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        count: int = 1,
        *,
        temperature: float = 1.0,
        max_tokens: int = 128,
        seed: int = 0,
        stop_ids: Sequence[int] | None = None,
        **filters: Any,
    ) -> list[list[Completion]]:
        """Return `count` completions of each prompt.

        Args:
            prompts: token ids.
            count: number of completions of a prompt.
            temperature: 0 is greedy.
            max_tokens: most tokens of a completion, a stop token included.
            seed: each completion has its own seed, which follows from this one.
            stop_ids: tokens that end a completion and stay in it; None: those of the model.
            filters: further fields of `hone.records.Sampling`, such as `top_p`.

        Completions have `ids`, `logprobs` (at the sampling temperature, unless `raw_logprobs` is
        given) and `finish_reason`. Raises ValueError for unknown ids or prompts that are too long.
        """
        stops = self.stop_ids if stop_ids is None else frozenset(stop_ids)
        sampling = Sampling(temperature, max_tokens, seed, **filters)
        requests = [
            GenerateRequest(
                list(prompt),
                replace(sampling, seed=seed + i * count + k),
                stops,
                adapter=self.adapter,
            )
            for i, prompt in enumerate(prompts)
            for k in range(count)
        ]
        done = [
            replace(one, versions=[self.version] * len(one.ids))
            for one in self.engine.generate(requests)
        ]
        return [done[i * count : (i + 1) * count] for i in range(len(prompts))]

    @torch.no_grad()
    def compute_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token after the first, at temperature 1."""
        ids = list(tokens)
        with self.engine.adapters.used_by_all(self.adapter, len(ids) - 1):
            return score_sequence(self.engine.model, ids)

    def close(self) -> None:
        """Free the snapshot; it cannot be sampled from afterwards."""
        if self.adapter is not None and self.adapter in self.engine.adapters.loaded:
            self.engine.unload_adapter(self.adapter)
