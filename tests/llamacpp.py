"""llama.cpp's own tokenizer and quantiser, of the package xllamacpp, by its C interface.

The interface is https://github.com/ggml-org/llama.cpp, `include/llama.h` and `ggml/include/ggml.h`.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
from typing import Any

import gguf
import httpx
import numpy as np

from tests.patience import PATIENCE_S


class _ModelParams(ctypes.Structure):
    """`llama_model_params`. Fields of later versions fit into `_rest`, because the structure goes by value."""

    _fields_ = [
        ("devices", ctypes.c_void_p),
        ("tensor_buft_overrides", ctypes.c_void_p),
        ("n_gpu_layers", ctypes.c_int32),
        ("modes", ctypes.c_int32 * 3),
        ("main_gpu", ctypes.c_int32),
        ("tensor_split", ctypes.c_void_p),
        ("progress_callback", ctypes.c_void_p),
        ("progress_callback_user_data", ctypes.c_void_p),
        ("kv_overrides", ctypes.c_void_p),
        ("vocab_only", ctypes.c_bool),
        ("_rest", ctypes.c_uint8 * 255),
    ]


_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


@_LogCallback
def _no_log(level: int, text: bytes, data: object) -> None:
    pass


class LlamaCppTokenizer:
    """The tokenizer of a GGUF file. Raises `ValueError` if llama.cpp refuses the file."""

    def __init__(self, path: pathlib.Path) -> None:
        self._library = _library()
        params = self._library.llama_model_default_params()
        params.vocab_only = True
        self._model = self._library.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise ValueError(f"llama.cpp does not load {path}")
        self._vocab = self._library.llama_model_get_vocab(self._model)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text in which special tokens are found, with the tokens that the file adds."""
        encoded = text.encode()
        room = len(encoded) + 8
        ids = (ctypes.c_int32 * room)()
        count = self._library.llama_tokenize(self._vocab, encoded, len(encoded), ids, room, True, True)
        assert 0 <= count <= room
        return list(ids[:count])

    def ends(self) -> set[int]:
        """Returns the ids of the tokens that end an answer."""
        count = self._library.llama_vocab_n_tokens(self._vocab)
        return {token for token in range(count) if self._library.llama_vocab_is_eog(self._vocab, token)}

    def close(self) -> None:
        self._library.llama_model_free(self._model)


def _library() -> ctypes.CDLL:
    from xllamacpp import xllamacpp

    library = ctypes.CDLL(xllamacpp.__file__)
    library.llama_model_default_params.restype = _ModelParams
    library.llama_model_load_from_file.restype = ctypes.c_void_p
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _ModelParams]
    library.llama_model_get_vocab.restype = ctypes.c_void_p
    library.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    library.llama_model_free.argtypes = [ctypes.c_void_p]
    library.llama_tokenize.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_int32,
        ctypes.POINTER(ctypes.c_int32),
        ctypes.c_int32,
        ctypes.c_bool,
        ctypes.c_bool,
    ]
    library.llama_vocab_n_tokens.argtypes = [ctypes.c_void_p]
    library.llama_vocab_is_eog.restype = ctypes.c_bool
    library.llama_vocab_is_eog.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    library.llama_log_set(_no_log, None)
    library.llama_backend_init()
    return library


def quantised_by_llamacpp(weight: np.ndarray, kind: str) -> np.ndarray:
    """Returns blocks of a type, uint8 [..., bytes of a row], as llama.cpp's quantiser makes them of a weight."""
    library, number = _library(), getattr(gguf.GGMLQuantizationType, kind)
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    rows = np.ascontiguousarray(weight, np.float32).reshape(-1, weight.shape[-1])
    inputs, block_bytes = gguf.GGML_QUANT_SIZES[number]
    blocks = np.zeros((len(rows), rows.shape[1] // inputs * block_bytes), np.uint8)
    importance = np.ones(rows.shape[1], np.float32)  # some types need it
    pointers = (ctypes.c_void_p(each.ctypes.data) for each in (rows, blocks))
    sizes = (ctypes.c_int64(each) for each in (0, *rows.shape))
    written = library.ggml_quantize_chunk(int(number), *pointers, *sizes, ctypes.c_void_p(importance.ctypes.data))
    assert written == blocks.nbytes
    return blocks.reshape(*weight.shape[:-1], -1)


def greedy_of_llamacpp(path: pathlib.Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Returns the greedy tokens of llama.cpp behind a prompt of ids, with keys and values in float32. The first end
    token is the last.
    """
    request = {
        "prompt": prompt,
        "n_predict": num_tokens,
        "temperature": 0,
        "cache_prompt": False,
        "return_tokens": True,
    }
    answer = httpx.post(f"{_server(path).listening_address}/completion", json=request, timeout=PATIENCE_S)
    return answer.raise_for_status().json()["tokens"]


@functools.cache
def _server(path: pathlib.Path) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel = 1
    params.n_ctx = 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = 0  # GGML_TYPE_F32
    params.warmup = False
    return xllamacpp.Server(params)
