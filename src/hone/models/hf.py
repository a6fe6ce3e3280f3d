"""Load and save models in Hugging Face format; convert between HF tensors and fused parameters.

directory or hub id ─ config.json ─► ModelSpec ─► Transformer ◄─ *.safetensors (HF names, split)
Transformer ─ unfuse ─► HF names ─► model.safetensors + config, tokenizer and template of the source
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hone.models.families import parse_model_config
from hone.models.families.gemma4 import Gemma4
from hone.models.families.hf_spec import HFSpec
from hone.models.gemma4 import Gemma4Transformer
from hone.models.hf_model import HFModel
from hone.models.language_model import LanguageModel
from hone.models.model_directory import TEXT_FILES, leads_out
from hone.models.mxfp4 import BLOCKS, SCALES, has_packed_weights, list_packed_parts, unpack_mxfp4
from hone.models.spec import ModelSpec, read_model_config
from hone.models.transformer import Transformer
from hone.run_directory import appearing_directory
from hone.text.model_text import read_json, write_template

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
# Prefixes of files that are not weights.
UNRELATED = re.compile(r"adapter_|optimizer|consolidated|original|training_")
log = logging.getLogger("hone.model")


def model_class(spec: ModelSpec) -> type[LanguageModel]:
    """Return the class that computes models of this shape."""
    if isinstance(spec, HFSpec):
        return HFModel
    return Gemma4Transformer if isinstance(spec, Gemma4) else Transformer


def hf_names(spec: ModelSpec) -> dict[str, list[str]]:
    """Return, by parameter name, the names of the HF tensors that the parameter stacks by rows."""
    return model_class(spec).weight_names(spec)


def split_rows(spec: ModelSpec, name: str, weight: Tensor) -> list[Tensor]:
    """Split a fused parameter into the row blocks of its HF tensors, in the order of `hf_names`."""
    rows = spec.stacked_rows(name)
    return list(weight.split(rows)) if rows else [weight]


def load_model(
    directory: Path,
    *,
    random_init: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    spec: ModelSpec | None = None,
) -> LanguageModel:
    """Load a model directory, ready to train or sample.

    `spec` is its shape; None: as its config.json says. `random_init` draws new weights from `seed`,
    on the device, and needs no weight files; a CPU and a GPU draw different ones. Raises ValueError
    if weights are missing, unexpected or of another shape than `config.json` says.
    """
    if spec is None:
        spec = parse_model_config(read_model_config(directory), str(directory / "config.json"))
    model = empty_model(spec, dtype, device)
    if random_init:
        model.init_weights(torch.Generator(device).manual_seed(seed))
    else:
        _load_stored(model, directory)
    model = model.to(device)
    model.refuse_unsupported()
    return model


def empty_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device | str) -> LanguageModel:
    """Return a model with uninitialized weights."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return model_class(spec)(spec)
    finally:
        torch.set_default_dtype(default)


def _load_stored(model: LanguageModel, directory: Path) -> None:
    """Load weights from a directory, in whatever form its files have them."""
    wanted = dict(hf_tensors(model, _stores_whole_experts(model.spec, directory)))
    stored = list_stored(directory)
    if has_packed_weights(wanted, stored):
        load_packed_weights(wanted, directory)
        return
    is_part = model.spec.is_text_part
    if is_part or not model.has_other_forms or wanted.keys() <= stored:
        names = match_names(wanted, stored) if is_part else {name: name for name in wanted}
        into = {names[name]: x for name, x in wanted.items()}
        load_weights(into, directory, is_part, model.spec.is_unused)
        return
    converted = model.read_converted(directory)
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(converted[name])


def list_stored(directory: Path) -> set[str]:
    """Return the names of the tensors in a directory's weight files. Raises ValueError."""
    files, listed = weight_files(directory)
    return set(listed) if listed is not None else {key for x in files for key in _read_shapes(x)}


def names_in_files(spec: ModelSpec, names: list[str], directory: Path) -> dict[str, str]:
    """Return, by a model's HF names, the names of its tensors in the files of a directory.

    They differ if the model is the text part of another one, whose files have a prefix of their own.
    """
    if not spec.is_text_part:
        return {name: name for name in names}
    return match_names(names, list_stored(directory))


def stored_names(model: LanguageModel, directory: Path) -> dict[str, str]:
    """Return `names_in_files` of all of a model's tensors; their HF names if there are no files."""
    names = [name for name, _ in hf_tensors(model)]
    if not any(directory.glob("*.safetensors")):
        return {name: name for name in names}
    return names_in_files(model.spec, names, directory)


def match_names(names: Iterable[str], stored: Collection[str]) -> dict[str, str]:
    """Return, by a text model's names, those of `stored` for the same tensors.

    A name without a match is spelled as that of the embedding is.
    """
    spellings = list(_spell_in_whole(EMBEDDING))
    kind = next((i for i, spelled in enumerate(spellings) if spelled in stored), 0)
    found = {}
    for name in names:
        own = list(_spell_in_whole(name))
        found[name] = next((x for x in own if x in stored), own[min(kind, len(own) - 1)])
    return found


def _spell_in_whole(name: str) -> Iterator[str]:
    """Yield the names that a text model's tensor may have in a model with other parts."""
    yield name
    yield f"language_model.{name}"
    first, _, rest = name.partition(".")
    if first == "model":
        yield f"model.language_model.{rest}"


@torch.no_grad()
def load_packed_weights(into: Mapping[str, Tensor], directory: Path) -> None:
    """Load weights of which some are stored in MXFP4, like `load_weights`.

    A packed weight is experts x inputs x outputs in `into`; the files pack it along the inputs.
    """
    stored = list_stored(directory)
    expected: dict[str, Tensor] = {}
    for name, tensor in into.items():
        expected |= list_packed_parts(name, tensor) if name + BLOCKS in stored else {name: tensor}
    where = find_weights(expected, directory)
    require_tied_head(into, where, directory)
    _copy_tensors({name: x for name, x in into.items() if name + BLOCKS not in stored}, where)
    for name, tensor in into.items():
        if name + BLOCKS in stored:
            blocks, scales = (_read_bytes(where[n], n) for n in (name + BLOCKS, name + SCALES))
            for i in range(len(tensor)):
                tensor[i].copy_(unpack_mxfp4(blocks[i], scales[i], tensor.dtype).T)


def _read_bytes(file: Path, name: str) -> Tensor:
    """Return a stored tensor. Raises ValueError if it is not uint8."""
    with safe_open(file, framework="pt") as reader:
        found: Tensor = reader.get_tensor(name)
    if found.dtype != torch.uint8:
        raise ValueError(f"{file}: {name} is {str(found.dtype)[6:]}; MXFP4 is stored as uint8")
    return found


@torch.no_grad()
def load_weights(
    into: Mapping[str, Tensor],
    directory: Path,
    has_other_parts: bool = False,
    is_unused: Callable[[str], bool] = lambda name: False,
) -> None:
    """Copy a directory's weights into existing tensors, given by HF name, on any device.

    With `has_other_parts` the directory may have further tensors, else only those whose names
    `is_unused` accepts. Raises ValueError like `load_model`, before any tensor is changed.
    """
    where = find_weights(into, directory, has_other_parts, is_unused)
    require_tied_head(into, where, directory)
    _copy_tensors(into, where)


def _copy_tensors(into: Mapping[str, Tensor], where: Mapping[str, Path]) -> None:
    """Copy stored tensors into existing ones; `where` has the file of each, by name."""
    for file in sorted({where[name] for name in into}):
        with safe_open(file, framework="pt") as reader:
            for name, tensor in into.items():
                if where[name] == file:
                    tensor.copy_(reader.get_tensor(name))


def require_tied_head(
    wanted: Mapping[str, Tensor], where: Mapping[str, Path], directory: Path
) -> None:
    """Raise ValueError if config.json ties head and embedding, but the files store different ones.

    `wanted` has the model's tensors, `where` the file of each stored tensor, by HF name.
    """
    head, embedding = (
        next((x for x in _spell_in_whole(name) if x in where), None) for name in (HEAD, EMBEDDING)
    )
    if head is None or embedding is None or head in wanted:
        return
    found = []
    for name in (head, embedding):
        with safe_open(where[name], framework="pt") as reader:
            found.append(reader.get_tensor(name))
    if found[0].shape != found[1].shape or not torch.equal(*found):
        raise ValueError(
            f"{directory}: {head} differs from {embedding}, though config.json says that they are one "
            "(tie_word_embeddings); set it to false to use both"
        )


def find_weights(
    wanted: Mapping[str, Tensor] | None,
    directory: Path,
    has_other_parts: bool = False,
    is_unused: Callable[[str], bool] = lambda name: False,
) -> dict[str, Path]:
    """Return the file of each tensor, by HF name.

    With `has_other_parts` there may be tensors that are not `wanted`, else only those whose names
    `is_unused` accepts. Raises ValueError for unreadable files, or if names or shapes differ from
    those of `wanted`.
    """
    files, listed = weight_files(directory)
    shapes = {file: _read_shapes(file) for file in files}
    where = {key: file for file in files for key in shapes[file]} if listed is None else listed
    for name, file in where.items():
        if name not in shapes[file]:
            raise ValueError(f"{directory / INDEX}: tensor {name} is not in {file.name}")
    if listed is None:
        _refuse_duplicates(shapes, where, directory)
    if wanted:
        _check_tensors(wanted, where, shapes, directory)
        surplus = [] if has_other_parts else _list_surplus(wanted, where, is_unused)
        if surplus:
            raise ValueError(
                f"{directory}: tensors that the model does not have: {', '.join(surplus[:5])}"
            )
    return where


def _check_tensors(
    wanted: Mapping[str, Tensor],
    where: Mapping[str, Path],
    shapes: Mapping[Path, Mapping[str, tuple[int, ...]]],
    directory: Path,
) -> None:
    """Raise ValueError if a tensor is missing or has another shape."""
    for name, tensor in wanted.items():
        if name not in where:
            read = ", ".join(file.name for file in shapes)
            raise ValueError(f"{directory}: tensor {name} is missing from {read}")
        shape = shapes[where[name]][name]
        if shape != tuple(tensor.shape):
            raise ValueError(
                f"{where[name]}: {name} has shape {shape}, config.json says {tuple(tensor.shape)}"
            )


def _list_surplus(
    wanted: Mapping[str, Tensor], where: Mapping[str, Path], is_unused: Callable[[str], bool]
) -> list[str]:
    """Return the stored tensors that the model does not have, sorted."""
    # A tied checkpoint may store the head once more, older ones the rotary frequencies: both are derived.
    derived = {n for n in where if n == HEAD or n.endswith("rotary_emb.inv_freq")}
    surplus = where.keys() - wanted.keys() - derived
    return sorted(name for name in surplus if not is_unused(name))


def _refuse_duplicates(
    shapes: dict[Path, dict[str, tuple[int, ...]]], where: Mapping[str, Path], directory: Path
) -> None:
    """Raise ValueError if several files have the same tensor; for directories without an index."""
    twice = [key for file, found in shapes.items() for key in found if where[key] != file]
    if twice:
        pair = sorted({file.name for file, found in shapes.items() if twice[0] in found})
        raise ValueError(
            f"{directory}: tensor {twice[0]} is in {' and in '.join(pair)}; remove the file that is not meant"
        )


def weight_files(directory: Path) -> tuple[list[Path], dict[str, Path] | None]:
    """Return a model's weight files, and the file of each tensor if an index lists them.

    The first of these that exists is used: the files in the index; model.safetensors; the shards
    model-i-of-n.safetensors of one save; all other *.safetensors files except adapters, optimizer
    states and weights in the original, non-HF format. If files of the index are missing,
    model.safetensors is used instead. Raises ValueError if no complete set of weights is found.
    """
    every = {file.name: file for file in sorted(directory.glob("*.safetensors")) if file.is_file()}
    if (directory / INDEX).is_file():
        return _indexed_files(directory, every)
    if SINGLE in every:
        return [every[SINGLE]], None
    if shards := _complete_shards(directory, every):
        return shards, None
    rest = [file for name, file in every.items() if not UNRELATED.match(name)]
    if rest:
        return rest, None
    pickled = sorted(file.name for file in directory.glob("pytorch_model*.bin"))
    if pickled:
        raise ValueError(
            f"{directory} has its weights as {pickled[0]}, which can run code when read; save them as safetensors, "
            "by transformers: AutoModelForCausalLM.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)"
        )
    unrelated = f"; {', '.join(every)} are not a model's weights" if every else ""
    raise ValueError(
        f"{directory} has no *.safetensors weights{unrelated}; give a directory with weights, "
        "or --model.random-init to start from random ones"
    )


def _indexed_files(
    directory: Path, every: dict[str, Path]
) -> tuple[list[Path], dict[str, Path] | None]:
    """Return the weight files that the index lists, and the file of each tensor.

    If listed files are missing, returns model.safetensors and None. Raises ValueError.
    """
    listed = read_json(directory / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ValueError(f"{directory / INDEX} has no weight_map of tensors and their files")
    missing = sorted(set(listed.values()) - set(every))
    if missing and SINGLE not in every:
        raise ValueError(
            f"{directory / INDEX} names {', '.join(missing[:3])}, which {directory} does not have"
        )
    if missing:
        log.warning("%s: not read, since its files are not there: %s", directory, INDEX)
        return [every[SINGLE]], None
    others = sorted(set(every) - set(listed.values()))
    if others:
        log.warning(
            "%s: not read, since %s does not list them: %s", directory, INDEX, ", ".join(others)
        )
    where = {key: every[name] for key, name in listed.items()}
    return sorted(set(where.values())), where


def _complete_shards(directory: Path, every: dict[str, Path]) -> list[Path]:
    """Return the shards of one save, empty if there are none.

    Raises ValueError if some are missing, or if there are several saves.
    """
    shards: dict[str, list[Path]] = {}
    for name, file in every.items():
        if found := SHARD.fullmatch(name):
            shards.setdefault(found[1], []).append(file)
    whole = [files for count, files in shards.items() if len(files) == int(count)]
    if len(whole) > 1:
        raise ValueError(
            f"{directory} has the shards of {len(whole)} saves and no {INDEX}; remove those that are not meant"
        )
    if shards and not whole:
        count, files = next(iter(shards.items()))
        raise ValueError(
            f"{directory} has {len(files)} of {int(count)} shards of its weights, and no {INDEX}"
        )
    return whole[0] if whole else []


def _read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="pt") as reader:
            return {key: tuple(reader.get_slice(key).get_shape()) for key in reader.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors raises its own class for a damaged file
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from None


def hf_tensors(
    model: LanguageModel, has_whole_experts: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Return the model's weights under their HF names, as views.

    With `has_whole_experts`, or if the family always stores them so, the weights of all experts of a
    layer are one tensor.
    """
    is_whole = has_whole_experts or model.spec.stores_whole_experts
    for ours, theirs in hf_names(model.spec).items():
        weight = find_weight(model, ours)
        fused = model.spec.fused_name(ours) if is_whole else None
        if fused is not None:
            yield fused, weight.unflatten(0, (model.expert_layers[0].spec.experts, -1))
            continue
        yield from zip(theirs, split_rows(model.spec, ours, weight), strict=True)


def _stores_whole_experts(spec: ModelSpec, directory: Path) -> bool:
    """Return True if the files have one tensor for the weights of all experts of a layer."""
    if not spec.routed_experts:
        return False
    wholes = {spec.fused_name(ours) for ours in hf_names(spec)} - {None}
    stored = list_stored(directory)
    return any(name in stored for whole in wholes if whole for name in _spell_in_whole(whole))


def find_weight(model: LanguageModel, name: str) -> Tensor:
    """Return a weight by Hone's name, detached; one that is stored in 8 bits in the model's dtype."""
    path, _, leaf = name.rpartition(".")
    weight: Tensor = getattr(model.get_submodule(path), leaf)
    return weight.detach()


def save_model(model: LanguageModel, source: Path, directory: Path) -> None:
    """Write a model directory: the weights of `model`, other files from `source`.

    A temporary directory is written, then renamed to `directory`.
    """
    with appearing_directory(directory) as partial:
        write_model(model, source, partial)


def write_model(
    model: LanguageModel,
    source: Path,
    directory: Path,
    with_text: bool = True,
    chat_template: str | None = None,
) -> Path:
    """Write a model directory: weights, config.json, tokenizer and template.

    Without `with_text`, tokenizer and template are left out. Tensors of `source` that are not the
    model's, such as those of a vision tower, are written as they are there.
    """
    write_description(source, directory, next(model.parameters()).dtype, with_text, chat_template)
    has_files = any(source.glob("*.safetensors"))
    is_whole = has_files and _stores_whole_experts(model.spec, source)
    tensors = dict(hf_tensors(model, is_whole))
    if not model.spec.is_text_part:
        tensors = model.convert_for_files(tensors)
    elif has_files:
        stored = names_in_files(model.spec, list(tensors), source)
        tensors = {stored[name]: x for name, x in tensors.items()}
        tensors |= _read_others(set(tensors), source)
    write_weights(tensors, directory)
    return directory


def _read_others(names: set[str], source: Path) -> dict[str, Tensor]:
    """Return the tensors of a directory with other names than these."""
    found = {}
    for name, file in find_weights(None, source).items():
        if name not in names:
            with safe_open(file, framework="pt") as reader:
                found[name] = reader.get_tensor(name)
    return found


def write_weights(tensors: Mapping[str, Tensor], directory: Path) -> None:
    on_cpu = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(on_cpu, directory / "model.safetensors", metadata={"format": "pt"})


def write_description(
    source: Path,
    directory: Path,
    dtype: torch.dtype,
    with_text: bool,
    chat_template: str | None = None,
) -> None:
    """Write the files of an HF directory except the weights, copied from `source`.

    `dtype` is written to config.json. Without `with_text`, only config.json is written. A
    `chat_template` replaces that of `source`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for pattern in TEXT_FILES if with_text else []:
        for file in source.glob(pattern):
            if leads_out(file, source):
                log.warning("%s is not copied: it is a link that leads out of its directory", file)
            elif file.is_file() and not file.name.endswith(".safetensors.index.json"):
                target = directory / file.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)
    if with_text and chat_template is not None:
        write_template(directory, chat_template)
    config = read_model_config(source)
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)
    config.pop("quantization_config", None)  # weights are written as they are trained
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
