"""Compile all CPU kernels in several processes: `python -m hone.launch.kernels`, part of `make
setup`.
"""

import time

from hone import machine
from hone.child_process import end_with_parent


def main() -> None:
    machine.prepare_environment()  # sets what torch and numba read on import
    from hone.kernels import cpu

    if not cpu.IS_AVAILABLE:
        print("numba is not installed (hone-rl[cpu]): the CPU runs on plain torch")
        return
    from hone.kernels.cpu import compiling

    end_with_parent()
    start = time.perf_counter()
    with compiling.alone() as has_work:
        if has_work:
            print(compiling.words(), flush=True)
            calls = compiling.note()
            call_each()
            compiling.compile_all(calls)
    print(
        f"CPU kernels ready ({time.perf_counter() - start:.0f} s)"
        if compiling.keeps()
        else "no place to keep CPU kernels"
    )


def call_each() -> None:
    """Call every CPU kernel with argument types used in practice, to record what to compile."""
    import torch

    from hone.engine.cache import KVCache
    from hone.engine.packed_model import PackedModel
    from hone.kernels import row_state
    from hone.kernels.cpu import decode
    from hone.kernels.decode import DecodeRows, attend_by_pages
    from hone.kernels.fingerprints import Fingerprints
    from hone.kernels.logprobs import target_logprobs
    from hone.kernels.orthogonal import orthogonal
    from hone.models.attention_layouts import PackedAttention
    from hone.models.spec import ModelSpec, make_plain_layers
    from hone.models.transformer import Transformer

    T = 4
    E = 16
    layers = make_plain_layers(1e4, E, 1)
    spec = ModelSpec(2 * E, E, 2 * E, 1, 1, 1, E, 1e-6, layers, True, 64, 0.1, False)
    model = Transformer(spec)
    attention = PackedAttention([T])
    model.init_weights(torch.Generator())
    ones = torch.ones(T, dtype=torch.int64)
    scale = torch.ones(T)
    for _ in range(2):  # fused blocks; separate operations, as with an adapter
        hidden = model(ones, attention.token_positions(), attention)
        logprobs, _ = target_logprobs(model.compute_logits(hidden), ones, scale)
        logprobs.sum().backward()
        next(model.blocks.parameters()).requires_grad_(False)
    with torch.no_grad():
        orthogonal([model.embed.weight])
        Fingerprints([model.embed.weight])()
        rows = DecodeRows(ones, torch.zeros(T, row_state.FIELDS, dtype=torch.int64), ones[:, None])
        keys, values = torch.zeros(2, 2, 16, 1, E)
        query = torch.ones(T, 1, E)
        attend_by_pages(query, query, query, keys, values, rows)
        if PackedModel.supports_model(model):
            PackedModel(model, KVCache(spec, torch.float32, query.device, 32)).decode_rows(rows)
        tokens = torch.zeros(T, E, dtype=torch.int64)
        chosen = torch.zeros(T, E)
        stops = ones[:, None]
        parameters = torch.ones(T, row_state.PARAMETERS)
        logits = torch.ones(T, E)
        inputs = [t.data_ptr() for t in (parameters, rows.state, ones, stops)]
        outputs = (tokens.data_ptr(), chosen.data_ptr(), E)
        decode.draw(T, E, logits.data_ptr(), logits.data_ptr(), 0, *inputs, 1, *outputs, 1)


if __name__ == "__main__":
    main()
