"""An inference server with a fault in how it takes weights, from version 2 on: `faulty_server.py FAULT ARGUMENTS`."""

import sys
from pathlib import Path

import torch

from hone.cli import inference
from hone.inference import control

FAULT, FROM = sys.argv.pop(1), 2
load_weights, merge_adapter = control.load_weights, control.merge_adapter


def is_due(directory: Path) -> bool:
    return int(directory.name.removeprefix("step_")) >= FROM


@torch.no_grad()
def corrupted(model, directory):
    load_weights(model, directory)
    if is_due(directory):
        model.blocks[1].mlp.down.weight.view(torch.int32)[3, 5] ^= 1  # one bit on its way


def stale(model, directory):
    if not is_due(directory):
        load_weights(model, directory)


def without_adapter(model, directory):
    if not is_due(directory):
        merge_adapter(model, directory)


if FAULT == "dropped-adapter":
    control.merge_adapter = without_adapter
else:
    control.load_weights = {"corrupted": corrupted, "stale": stale}[FAULT]

if __name__ == "__main__":
    inference()
