"""An inference server with a fault in how it takes weights, from version 2 on: `faulty_server.py FAULT ARGUMENTS`."""

import sys
from pathlib import Path

import torch

from hone.cli import inference
from hone.transport import adapter, files

FAULT, FROM = sys.argv.pop(1), 2
load_weights, merge_adapter = files.load_weights, adapter.merge_adapter


def is_due(directory: Path) -> bool:
    return int(directory.name.removeprefix("step_")) >= FROM


@torch.no_grad()
def corrupted(into, directory):
    load_weights(into, directory)
    if is_due(directory):
        into["model.layers.1.mlp.down_proj.weight"].view(torch.int32)[3, 5] ^= (
            1  # one bit on its way
        )


def stale(into, directory):
    if not is_due(directory):
        load_weights(into, directory)


def without_adapter(into, directory):
    if not is_due(directory):
        merge_adapter(into, directory)


if FAULT == "dropped-adapter":
    adapter.merge_adapter = without_adapter
else:
    files.load_weights = {"corrupted": corrupted, "stale": stale}[FAULT]

if __name__ == "__main__":
    inference()
