"""Protobuf messages of Tinker's API, and their conversion to and from those of a session.

Field numbers are those of the SDK 0.38. Enumerations are integers and maps are lists of entries
here, which is the same on the wire.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hone.records import Completion
from hone.session.session_data import PER_TARGET, Datum, ForwardOutput

# Per message: name, number and type of each field; * marks a list.
SCHEMA = {
    "SparseCsr": "values=1 bytes, crow_indices=2 bytes, col_indices=3 bytes",
    "Tensor": "dense=1 bytes, sparse_csr=2 SparseCsr, dtype=3 int32, shape=4 *int64",
    "BatchedTensor": "data=1 bytes, offsets=2 bytes, dtype=3 int32, trailing_shape=4 *int64",
    "TensorEntry": "key=1 string, value=2 Tensor",
    "FieldEntry": "key=1 string, value=2 BatchedTensor",
    "NumberEntry": "key=1 string, value=2 double",
    "ArrayRecord": "type_tag=1 string, fields=2 *FieldEntry, num_datums=3 int64",
    "ForwardBackwardOutput": "type=1 string, records=2 *ArrayRecord, metrics=3 *NumberEntry",
    "SettingValue": "number=1 double, text=2 string",
    "SettingEntry": "key=1 string, value=2 SettingValue",
    "EncodedText": "tokens=1 bytes",
    "Chunk": "encoded_text=1 EncodedText",
    "Datum": "model_input=1 *Chunk, loss_fn_inputs=2 *TensorEntry",
    "ForwardBackwardRequest": "model_id=1 string, seq_id=2 int32, data=3 *Datum, loss_fn=4 string, "
    "loss_fn_config=5 *NumberEntry, forward_only=6 bool, loss_fn_config_v2=7 *SettingEntry",
    "TopkLogprobs": "token_ids=1 bytes, logprobs=2 bytes, k=3 uint32, length=4 uint32",
    "SampledSequence": "stop_reason=1 int32, tokens=2 bytes, logprobs=3 bytes, topk=4 TopkLogprobs",
    "SampleResponse": "sequences=1 *SampledSequence, prompt_logprobs=2 bytes, "
    "topk_prompt_logprobs=3 TopkLogprobs",
}
DTYPES = {1: np.float32, 2: np.int64, 3: np.int32}
FLOAT32 = 1
UNKNOWN_LOGPROB = -99999.0  # of an empty cell of TopkLogprobs
STOP_REASONS = {"stop": 0, "length": 1}
# Inputs of losses by the names of the SDK.
TARGETS_NAME = "target_tokens"
Likeliest = Sequence[Sequence[tuple[int, float]]]


@functools.cache
def message_class(name: str) -> Callable[[], Any]:
    """Return the class of a message of SCHEMA. Raises ValueError if protobuf is not installed."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise ValueError(
            "hone tinker needs the package protobuf: pip install 'hone-rl[tinker]'"
        ) from None
    return message_factory.GetMessageClass(
        _build_pool(descriptor_pb2, descriptor_pool).FindMessageTypeByName(f"hone.{name}")
    )


@functools.cache
def _build_pool(descriptor_pb2: Any, descriptor_pool: Any) -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="hone_tinker.proto", package="hone", syntax="proto3"
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            place, kind = text.split(" ")
            key, number = place.split("=")
            is_list, kind = kind.startswith("*"), kind.removeprefix("*")
            field = message.field.add(
                name=key,
                number=int(number),
                label=kinds.LABEL_REPEATED if is_list else kinds.LABEL_OPTIONAL,
            )
            if kind in SCHEMA:
                field.type = kinds.TYPE_MESSAGE
                field.type_name = f".hone.{kind}"
            else:
                field.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def parse_message(name: str, body: bytes) -> Any:
    """Return a parsed message. Raises ValueError if `body` is none."""
    message: Any = message_class(name)()
    try:
        message.ParseFromString(body)
    except Exception as error:  # protobuf raises its own class
        raise ValueError(f"the body is no {name}: {error}") from None
    return message


# --------------------------------------------------------------------------------- requests


def decode_tensor(tensor: Any, place: str) -> NDArray[Any]:
    """Return a dense or compressed (CSR) tensor. Raises ValueError for a wrong one."""
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{place}: dtype {tensor.dtype} is not one of float32, int64, int32")
    dtype, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
    try:
        if not tensor.HasField("sparse_csr"):
            flat = np.frombuffer(tensor.dense, dtype)
            return flat.reshape(shape) if shape else flat
        values = np.frombuffer(tensor.sparse_csr.values, dtype)
        ends = np.frombuffer(tensor.sparse_csr.crow_indices, np.int64)
        columns = np.frombuffer(tensor.sparse_csr.col_indices, np.int64)
        found = np.zeros(shape, dtype)
        found[np.repeat(np.arange(len(ends) - 1), np.diff(ends)), columns] = values
    except (ValueError, IndexError) as error:
        raise ValueError(f"{place}: not a tensor of shape {list(shape)}: {error}") from None
    return found


def decode_datum(message: Any, place: str) -> Datum:
    """Return the datum of a session. Raises ValueError for inputs that it cannot have."""
    tokens = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise ValueError(f"{place}: model_input has an image or sound; this model reads text")
        tokens.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
    given = {
        entry.key: decode_tensor(entry.value, f"{place}: {entry.key}")
        for entry in message.loss_fn_inputs
    }
    if TARGETS_NAME not in given:
        raise ValueError(f"{place}: loss_fn_inputs has no {TARGETS_NAME}")
    targets = given.pop(TARGETS_NAME)
    given.pop("mask", None)  # clients keep it for themselves
    unknown = sorted(set(given) - set(PER_TARGET))
    if unknown:
        raise ValueError(
            f"{place}: loss_fn_inputs has {unknown[0]}; known are {TARGETS_NAME}, {', '.join(PER_TARGET)}"
        )
    return Datum(np.concatenate(tokens) if tokens else [], targets, **given)


def decode_settings(request: Any) -> dict[str, float]:
    """Return a loss's settings. Raises ValueError if one is a text."""
    settings = {entry.key: entry.value for entry in request.loss_fn_config}
    for entry in request.loss_fn_config_v2:
        if entry.value.text:
            raise ValueError(f"loss_fn_config: {entry.key} is {entry.value.text!r}, not a number")
        settings[entry.key] = entry.value.number
    return settings


# ---------------------------------------------------------------------------------- results


def encode_forward_output(found: ForwardOutput) -> bytes:
    """Return ForwardBackwardOutput: each datum's log-probabilities, and the metrics."""
    message: Any = message_class("ForwardBackwardOutput")()
    message.type = "ArrayRecord"
    for rows in found.logprobs:
        # One record a datum: the second dimension may differ.
        record = message.records.add(type_tag="ArrayRecord", num_datums=1)
        field = record.fields.add(key="logprobs").value
        field.data = np.ascontiguousarray(rows, np.float32).tobytes()
        field.offsets = np.array([0, rows.size * 4], np.int64).tobytes()
        field.dtype = FLOAT32
        field.trailing_shape.extend(rows.shape[1:])
    for name, value in found.metrics.items():
        message.metrics.add(key=name, value=value)
    body: bytes = message.SerializeToString()
    return body


def encode_samples(
    completions: Sequence[Completion],
    top: int,
    prompt_logprobs: Sequence[float | None] | None = None,
    likeliest: Likeliest | None = None,
) -> bytes:
    """Return SampleResponse.

    Args:
        completions: the samples.
        top: number of likeliest tokens that is returned for each sampled one.
        prompt_logprobs: logprob of each token of the prompt; None where it has none.
        likeliest: for each token of the prompt the likeliest tokens, with their logprobs.
    """
    message: Any = message_class("SampleResponse")()
    for completion in completions:
        sequence = message.sequences.add()
        sequence.stop_reason = STOP_REASONS.get(completion.finish_reason, 1)
        sequence.tokens = np.array(completion.ids, np.int32).tobytes()
        sequence.logprobs = np.array(completion.logprobs, np.float32).tobytes()
        if top:
            _fill_likeliest(sequence.topk, completion.alternatives or [], top)
    if prompt_logprobs is not None:
        numbers = [np.nan if x is None else x for x in prompt_logprobs]
        message.prompt_logprobs = np.array(numbers, np.float32).tobytes()
    if likeliest is not None:
        _fill_likeliest(message.topk_prompt_logprobs, likeliest, max(map(len, likeliest)))
    body: bytes = message.SerializeToString()
    return body


def _fill_likeliest(field: Any, rows: Likeliest, count: int) -> None:
    ids = np.zeros((len(rows), count), np.int32)
    logprobs = np.full((len(rows), count), UNKNOWN_LOGPROB, np.float32)
    for i, row in enumerate(rows):
        for j, (token, logprob) in enumerate(row[:count]):
            ids[i, j], logprobs[i, j] = token, logprob
    field.token_ids, field.logprobs = ids.tobytes(), logprobs.tobytes()
    field.k, field.length = count, len(rows)
