"""CUDA graphs of a micro-batch's forward and backward pass through the blocks.

    tokens, tables of attention ─► [forward graph] ─► hidden states ─ head and loss, launched as usual
    gradients of the parameters ◄─ [backward graph] ◄─ gradient of the hidden states ◄─┘

A block launches about thirty kernels, which takes the host longer than a small micro-batch takes the
GPU. Passes whose arithmetic is small are therefore computed with rounded numbers of tokens, and
captured when a rounded shape occurs for the second time. Padding tokens are sequences of their own
without targets. The first pass of a shape is padded too, so that it has the bits of later ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hone.kernels import numerics
from hone.kernels.gpu import power_of_2, trains_model
from hone.kernels.pinned_memory import to_device
from hone.models.attention_layouts import PlannedAttention
from hone.models.language_model import LanguageModel
from hone.models.lora import lora_modules
from hone.trainer.memory_estimate import token_bytes
from hone.trainer.packing import Packed

# FLOP of a block's forward and backward pass: about what a GPU computes in the 3 ms that a host
# needs to launch them.
WORTH_A_GRAPH = 1.2e12
MOST_GRAPHS = 16
ROOM = 1.5  # free memory that a capture needs, as a multiple of the pass's activations
PADDING_TOKENS = 64  # of a sequence of padding


class Shape(NamedTuple):
    """Rounded sizes of a pass: tokens, and rows of the tables of attention's tiles."""

    tokens: int
    queries: int
    keys: int
    sums: int
    parts: int
    has_prefixes: bool


@dataclass
class Graphs:
    """A captured pass with the tensors that it reads and writes."""

    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    hidden_TD: Tensor
    grad_TD: Tensor


class PassInputs:
    """The inputs of passes of one shape, at addresses that stay."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        from hone.kernels.gpu.attention import FIELDS, Tiles

        def integers(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        self.tokens_T, self.positions_T = integers(2, shape.tokens, dtype=torch.int64)
        rows = (shape.queries, shape.keys, shape.sums)
        of_queries, of_keys, of_sums = integers(sum(rows), FIELDS.value).split(rows)
        self.tables = (of_queries, of_keys, of_sums)
        tiles = Tiles(of_queries, of_keys, of_sums, shape.parts, shape.has_prefixes)
        self.attention = PlannedAttention(tiles, device)


class TrainingGraphs:
    """Passes through a model's blocks with gradients, captured where that saves time."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.inputs: dict[Shape, PassInputs] = {}
        self.captured: dict[Shape, Graphs] = {}
        self._pool: Any = None
        # Written by every backward graph: only one pass is under way at a time.
        self._grads: list[Tensor] = []
        # Makes the hidden states require a gradient; has none itself.
        self._anchor = torch.zeros((), device=model.embed.weight.device, requires_grad=True)

    @staticmethod
    def for_model(model: LanguageModel, is_sharded: bool) -> "TrainingGraphs | None":
        """Return graphs for the model, None if its passes with gradients make the host wait."""
        spec = model.spec
        on_device = trains_model(model.embed.weight, spec.head_dim) and model.stays_on_device
        on_device = on_device and not spec.delta_layers  # whose plans the host makes
        is_plain = spec.has_plain_heads and spec.has_plain_attention
        if not (on_device and is_plain and all(one.is_plain for one in lora_modules(model))):
            return None
        return None if is_sharded or numerics.is_exact() else TrainingGraphs(model)

    def takes_pass(self, packed: Packed) -> bool:
        """Return True if a pass over these tokens is to run here: with gradients, and small."""
        spec = self.model.spec
        work = 3 * spec.flops_per_token(head=0.0) * len(packed.tokens_T) / spec.num_hidden_layers
        has_host_work = self.model.recomputes or self.model.routing_TR is not None
        return torch.is_grad_enabled() and not has_host_work and 0 < work < WORTH_A_GRAPH

    def compute_hidden(self, packed: Packed) -> Tensor:
        """Return the hidden states of all tokens, T x D, and of padding behind them.

        Their backward pass adds to the parameters' gradients.
        """
        plan = _PaddedPlan(packed)
        is_new = plan.shape not in self.inputs
        if is_new:
            self.inputs[plan.shape] = PassInputs(plan.shape, self._anchor.device)
        inputs = self.inputs[plan.shape]
        plan.fill_inputs(inputs)
        if plan.shape not in self.captured:
            if is_new or len(self.captured) >= MOST_GRAPHS or not self._has_room(plan.shape):
                return self._run_model(inputs)
            self.captured[plan.shape] = self._capture_pass(inputs)
        hidden_TD: Tensor = _Replay.apply(self._anchor, self, self.captured[plan.shape])  # type: ignore[no-untyped-call]
        return hidden_TD

    def _has_room(self, shape: Shape) -> bool:
        """Return True if the device has memory for activations that stay allocated between passes."""
        weight = self.model.embed.weight
        of_token = token_bytes(self.model.spec, weight.dtype.itemsize, recomputes=False)
        free, _ = torch.cuda.mem_get_info(weight.device)
        unused = torch.cuda.memory_reserved(weight.device) - torch.cuda.memory_allocated(
            weight.device
        )
        return free + unused > ROOM * of_token * shape.tokens

    def _run_model(self, inputs: PassInputs) -> Tensor:
        return self.model(inputs.tokens_T, inputs.positions_T, inputs.attention)

    def _capture_pass(self, inputs: PassInputs) -> Graphs:
        def differentiate(hidden_TD: Tensor, grad_TD: Tensor, leaves: list[Tensor]) -> None:
            end = _End.apply(hidden_TD, grad_TD)  # type: ignore[no-untyped-call]
            found = torch.autograd.grad(end, leaves, allow_unused=True)
            for own, grad in zip(self._grads, found, strict=True):
                own.zero_() if grad is None else own.copy_(grad)

        self._keep_earlier_gradients()
        self._grads = self._grads or [torch.empty_like(p) for p in self.parameters]
        hidden_TD = self._run_model(inputs)  # compiles what these shapes need
        grad_TD = torch.zeros_like(hidden_TD)
        differentiate(hidden_TD, grad_TD, self.parameters)
        del hidden_TD
        torch.cuda.synchronize()
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: checkpoints are written in theirs.
        mode = "thread_local"
        with self._fresh_leaves() as leaves:
            with torch.cuda.graph(forward, pool=self._pool, capture_error_mode=mode):
                hidden_TD = self._run_model(inputs)
            self._pool = self._pool or forward.pool()
            with torch.cuda.graph(backward, pool=self._pool, capture_error_mode=mode):
                differentiate(hidden_TD, grad_TD, leaves)
        # Without its history, so that later captures reuse the memory of this one's activations
        return Graphs(forward, backward, hidden_TD.detach(), grad_TD)

    @contextmanager
    def _fresh_leaves(self) -> Iterator[list[Tensor]]:
        """Replace the trained parameters by aliases of them, and yield these.

        While the graph of an earlier pass is alive, autograd adds the gradients of its parameters
        on that pass's stream, for which a capture cannot wait.
        """
        aliases = [nn.Parameter(p.detach()) for p in self.parameters]
        alias_of = {id(p): alias for p, alias in zip(self.parameters, aliases, strict=True)}
        replaced = [
            (module, name, parameter)
            for module in self.model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if id(parameter) in alias_of
        ]
        for module, name, parameter in replaced:
            setattr(module, name, alias_of[id(parameter)])
        try:
            yield [*aliases]
        finally:
            for module, name, parameter in replaced:
                setattr(module, name, parameter)

    def _keep_earlier_gradients(self) -> None:
        """Copy gradients that are still in the graphs' own tensors, which will be written again."""
        for parameter, grad in zip(self.parameters, self._grads, strict=False):
            if parameter.grad is not None and parameter.grad.data_ptr() == grad.data_ptr():
                parameter.grad = grad.clone()

    def replay_backward(self, graphs: Graphs) -> None:
        """Replay a backward graph, and add its gradients to those of the parameters.

        A parameter without a gradient gets the graph's own tensor, which saves a copy.
        """
        self._keep_earlier_gradients()
        graphs.backward.replay()
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad.add_(grad)


class _PaddedPlan:
    """The tokens and tables of a micro-batch, with padding to a rounded shape."""

    def __init__(self, packed: Packed) -> None:
        from hone.kernels.gpu.attention import plan_tiles

        sequences = packed.attention.sequences
        count = len(packed.tokens_T)
        self.packed = packed
        self.tokens = _round_up(count)
        starts = np.arange(count, self.tokens, PADDING_TOKENS)
        lengths = np.minimum(PADDING_TOKENS, self.tokens - starts)
        nothing = np.zeros_like(starts)
        rows = np.concatenate(
            [sequences.rows, np.stack([starts, lengths, nothing, nothing], axis=1)]
        )
        own = sequences.groups[-1] + 1 + np.arange(len(starts))
        groups = np.concatenate([sequences.groups, own])
        self.plan = plan_tiles(rows, groups)
        self.shape = Shape(
            self.tokens,
            _round_rows(len(self.plan.of_queries)),
            _round_rows(len(self.plan.of_keys)),
            _round_rows(len(self.plan.of_sums)),
            _round_rows(self.plan.parts),
            self.plan.has_prefixes,
        )
        self.padding = np.arange(self.tokens - count) % PADDING_TOKENS

    def fill_inputs(self, inputs: PassInputs) -> None:
        packed = self.packed
        count = len(packed.tokens_T)
        inputs.tokens_T[:count].copy_(packed.tokens_T)
        inputs.tokens_T[count:].zero_()
        inputs.positions_T[:count].copy_(packed.attention.token_positions())
        inputs.positions_T[count:].copy_(to_device(self.padding, inputs.positions_T.device))
        tables = (self.plan.of_queries, self.plan.of_keys, self.plan.of_sums)
        for place, table in zip(inputs.tables, tables, strict=True):
            place.copy_(to_device(_pad_rows(table, len(place)), place.device))


class _End(torch.autograd.Function):
    """A scalar with a given gradient: torch takes seconds of imports to begin with anything else."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, grad_TD: Tensor) -> Tensor:
        ctx.save_for_backward(grad_TD)
        return hidden_TD.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.saved_tensors[0], None


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, owner: TrainingGraphs, graphs: Graphs) -> Tensor:
        graphs.forward.replay()
        ctx.owner = owner
        ctx.graphs = graphs
        return graphs.hidden_TD.view_as(graphs.hidden_TD)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.graphs.grad_TD.copy_(grad)
        ctx.owner.replay_backward(ctx.graphs)
        return None, None, None


def _round_up(count: int) -> int:
    """Return the number of tokens of a padded pass: an eighth of a power of 2 at most is padding."""
    step = max(power_of_2(count) // 8, PADDING_TOKENS)
    return -(-count // step) * step


def _round_rows(count: int) -> int:
    return 0 if count == 0 else max(8, power_of_2(count))


def _pad_rows(table: NDArray[np.int32], rows: int) -> NDArray[np.int32]:
    """Return the table with rows of tiles that have no queries and no keys."""
    padded = np.zeros((rows, table.shape[1]), dtype=np.int32)
    padded[: len(table)] = table
    padded[len(table) :, -1] = -1  # not a part of a sum
    return padded
