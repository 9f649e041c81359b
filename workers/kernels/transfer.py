"""Copies of arrays to the device and back, without waiting for what the device does."""

from __future__ import annotations

import numpy as np
import torch


def place(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on the device, in the order of its stream; on a CPU the array itself, which nobody changes while the
    result is in use. Through pinned memory, which torch keeps until it has been read: from other memory CUDA may first
    wait for all that the stream has to do.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def place_rows(rows: np.ndarray, indices: list[int], device: torch.device) -> torch.Tensor:
    """Returns the named rows of an int32 matrix as `place` would. This thread alone makes the only copy on the host,
    because the other processors may fill the next rows.
    """
    staged = torch.empty((len(indices), rows.shape[1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    np.take(rows, indices, axis=0, out=staged.numpy(), mode="clip")  # any other mode makes a copy in between
    return move(staged, device)


def staging(num_words: int, device: torch.device) -> torch.Tensor:
    """Returns zeros on the host, int32 [num_words], to be filled and then given to `move`. For CUDA they lie in pinned
    memory, so that the move needs no copy in between.
    """
    return torch.zeros(num_words, dtype=torch.int32, pin_memory=device.type == "cuda")


def move(staged: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns what `staging` made on the device, in the order of its stream; on a CPU the tensor itself."""
    return staged.to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory, which torch pins, to be read once the device has done what it was told so far."""
    return tensor.to("cpu", non_blocking=True)
