"""Find a model's directory, and check its links. Imports no torch, so that servers start without it."""

import difflib
from pathlib import Path

from hone.config.key_names import key_name
from hone.text.model_text import TEMPLATE_FOLDER

WEIGHT_PATTERNS = ["*.safetensors", "*.safetensors.index.json"]
# Files that accompany weights.
TEXT_FILES = ["*.json", "*.txt", "*.jinja", "*.model", f"{TEMPLATE_FOLDER}/*.jinja"]


def leads_out(file: Path, directory: Path) -> bool:
    """Return True if a file in a model's directory is a link to a file outside of it.

    Such a link must not be followed when files are copied: its target could be private. Links from
    `snapshots` to `blobs` in the cache of the Hugging Face hub are allowed.
    """
    target = file.resolve()
    inside = directory.resolve()
    blobs = inside.parents[1] / "blobs" if inside.parent.name == "snapshots" else inside
    return not (target.is_relative_to(inside) or target.is_relative_to(blobs))


def check_links(directory: Path) -> None:
    """Raise ValueError if a file that is copied with saved weights is a link out of `directory`."""
    for pattern in TEXT_FILES:
        for file in sorted(directory.glob(pattern)):
            if leads_out(file, directory):
                raise ValueError(
                    f"{file} is a link to {file.resolve()}, out of the model's directory; copy the file there"
                )


def resolve_model(name: str) -> Path:
    """Return a model's directory: `name` itself, or the cached or downloaded files of a hub id.

    Raises ValueError with the reason if `name` is neither.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"{key_name('model.name')}: {name} is a file; give the model's directory")
    if name.startswith(("/", ".", "~")) or name.count("/") != 1 or not name.isascii():
        raise ValueError(
            f"{key_name('model.name')}: no directory {name} here (a hub id has the form owner/model)"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=WEIGHT_PATTERNS + TEXT_FILES))
    except HFValidationError as error:
        raise ValueError(
            f"{key_name('model.name')}: {name} is neither a directory here nor a valid hub id: {error}"
        ) from None
    except LocalEntryNotFoundError:
        nearby = (
            [str(one) for one in path.parent.iterdir() if one.is_dir()]
            if path.parent.is_dir()
            else []
        )
        near = difflib.get_close_matches(str(path), nearby, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"{key_name('model.name')}: {name} is not a directory here, it is not in the hub "
            f"cache, and the hub cannot be reached{hint}"
        ) from None
    except HfHubHTTPError as error:
        raise ValueError(
            f"{key_name('model.name')}: the hub refused {name}: {str(error).splitlines()[0]}"
        ) from None
