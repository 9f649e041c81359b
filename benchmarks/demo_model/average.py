"""Writes the mean of several trainings of one model: `python -m benchmarks.demo_model.average OUT A=0.5 B=0.3 C=0.2`.

Trainings that went on from the same weights differ in what they forgot, and their mean forgets less of it (Wortsman et
al., "Model soups", 2022). `A` and the others are Hugging Face folders; `OUT` becomes the first one with other weights.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def average(folders: dict[pathlib.Path, float]) -> dict[str, torch.Tensor]:
    """The sum of each parameter times its folder's share, in the dtype of the first one."""
    parts = [(load_file(folder / WEIGHTS), share) for folder, share in folders.items()]
    return {
        name: sum(share * tensors[name].double() for tensors, share in parts).to(first.dtype)  # type: ignore[union-attr]
        for name, first in parts[0][0].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("folders", nargs="+", metavar="FOLDER=SHARE")
    options = parser.parse_args()
    named = [text.rpartition("=") for text in options.folders]
    folders = {pathlib.Path(name): float(share) for name, _, share in named}
    if abs(sum(folders.values()) - 1) > 1e-6:
        parser.error(f"the shares add up to {sum(folders.values()):g}; they must add up to 1")
    shutil.copytree(next(iter(folders)), options.output, dirs_exist_ok=True)
    save_file(average(folders), options.output / WEIGHTS, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
