"""Measures the rates of this machine, and computes how long a checkpoint's step or prefill takes at these rates.

- A decode step takes the time to read the weights at the measured bandwidth, or to multiply them at the measured rate
  if that takes longer, and the same for keys and values. Of a mixture's experts it reads those that are hit.
- A prefill multiplies the weights for every token, but the head for one a prompt.
- Rates are those of torch's own products of bfloat16 and int8 (oneDNN), where the processor has instructions for them.
  Elsewhere they follow from the float32 product's, held to the form's instructions.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

from manta.workers.kept_weights import GROUPS, LOSSLESS_BITS, SCALE_BYTES, kept_bytes
from manta.workers.kernels import processor

ISA = {"avx2": "AVX2", "avx512": "AVX512_CORE", "avx512_bf16": "AVX512_CORE"}
"""Instruction sets to which oneDNN and MKL are limited, by form; other forms do not limit them."""
INT8_OVER_FLOAT32 = {"avx512": 2, "avx_vnni": 4, "avx2": 2}
"""Rates of int8 products over float32's, by form, where torch's int8 product would take minutes. 32 products take one
instruction of AVX-VNNI, and two multiplications (`vpmaddubsw`, `vpmaddwd`) of AVX2; one multiply-add in float32 does 8.
With AVX-512 each does twice as many.
"""
RATE = """
import sys, time, torch
def best(run):
    run(); times = []; stop = time.perf_counter() + 1
    while time.perf_counter() < stop or len(times) < 3:
        start = time.perf_counter(); run(); times.append(time.perf_counter() - start)
    return min(times)
side = 2048
match sys.argv[1]:
    case "bandwidth":
        data = torch.ones(2**27)
        print(data.nbytes / best(data.sum))
    case "int8":
        left, right = torch.randint(-127, 128, (2, side, side), dtype=torch.int8)
        print(2 * side**3 / best(lambda: torch._int_mm(left, right)))
    case name:
        left, right = torch.randn(2, side, side).to(getattr(torch, name))
        print(2 * side**3 / best(lambda: left @ right))
"""
"""The script that measures bytes a second, or operations a second of products of a dtype."""
ELEMENT_BYTES = 2.0
"""Bytes of a weight, a key or a value in bfloat16."""
STATE_BYTES = 4
"""Bytes of a number of a recurrent state."""


class Rates(NamedTuple):
    bfloat16: float
    """Operations a second. Without instructions for bfloat16 the kernels widen it, so the rate is float32's. With them
    it is at least twice float32's, because an instruction (`vdpbf16ps`) takes twice as many numbers: torch's own
    product in bfloat16 may be slower than that in float32.
    """
    int8: float
    bandwidth: float
    """Bytes a second."""


def measure_rates(form: processor.Form, num_threads: int | None = None) -> Rates:
    """Measures with so many threads, or with all cores."""
    limit = {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}
    if form.name in ISA:
        limit |= {"ONEDNN_MAX_CPU_ISA": ISA[form.name], "MKL_ENABLE_INSTRUCTIONS": ISA[form.name][:6]}

    def measured(what: str) -> float:
        command = [sys.executable, "-c", RATE, what]
        done = subprocess.run(command, env={**os.environ, **limit}, capture_output=True, text=True, check=True)
        return float(done.stdout)

    float32 = measured("float32")
    has_int8 = form.has_bfloat16 or form.name == "avx512_vnni"
    return Rates(
        bfloat16=max(measured("bfloat16"), 2 * float32) if form.has_bfloat16 else float32,
        int8=measured("int8") if has_int8 else INT8_OVER_FLOAT32.get(form.name, 1) * float32,
        bandwidth=measured("bandwidth"),
    )


def bytes_of(bits: int | None) -> float:
    """Returns the bytes of a weight that Manta keeps in so many bits, with its share of a scale; None is bfloat16."""
    if bits == LOSSLESS_BITS:
        return kept_bytes(1024, 1024, bits) / 1024**2
    return ELEMENT_BYTES if bits is None else bits / 8 + SCALE_BYTES / GROUPS[bits]


class Shape:
    """The numbers that a step and a prefill cannot do without, from a checkpoint's files."""

    def __init__(self, folder: pathlib.Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        shapes = tensor_shapes(folder / "model.safetensors")
        head = "lm_head.weight" if "lm_head.weight" in shapes else "model.embed_tokens.weight"
        self.head_elements = math.prod(shapes[head])
        self.num_experts = config.get("num_experts") or config.get("num_local_experts") or 0
        self.experts_per_token = config.get("num_experts_per_tok") or 0
        self.layer_elements = self.expert_elements = 0
        for name, sizes in shapes.items():
            if ".experts." in name:
                self.expert_elements += 0 if name.endswith("bias") else math.prod(sizes) // self.num_experts
            elif len(sizes) == 2 and name not in ("lm_head.weight", "model.embed_tokens.weight"):
                self.layer_elements += math.prod(sizes)
        kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
        self.attending = [kind for kind in kinds if kind != "linear_attention"]
        num_states = len(kinds) - len(self.attending)
        width = config.get("linear_key_head_dim", 0) * config.get("linear_value_head_dim", 0)
        self.state_elements = num_states * config.get("linear_num_value_heads", 0) * width
        self.window = config.get("sliding_window") or sys.maxsize
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.query_width = config["num_attention_heads"] * head_dim
        self.kv_width = config["num_key_value_heads"] * head_dim

    def step_seconds(
        self,
        rows: int,
        context: int,
        rate: float,
        bandwidth: float,
        layer_bytes: float = ELEMENT_BYTES,
        head_bytes: float = ELEMENT_BYTES,
    ) -> float:
        """A decode step, with so many bytes for a weight of the layers and of the head, scales included. Linears first
        wait for one thing, then attention for another; a state is read and written.
        """
        products = rows * (self.layer_elements + self.experts_per_token * self.expert_elements + self.head_elements)
        read = self.layer_elements + self.experts_hit(rows) * self.expert_elements
        num_bytes = read * layer_bytes + self.head_elements * head_bytes
        linears = max(num_bytes / bandwidth, 2 * products / rate)
        keys = rows * self._keys(context)
        attention = max(keys * self.kv_width * 2 * ELEMENT_BYTES / bandwidth, 4 * keys * self.query_width / rate)
        return linears + attention + rows * self.state_elements * 2 * STATE_BYTES / bandwidth

    def chunk_seconds(self, start: int, num_tokens: int, rate: float, bandwidth: float) -> float:
        """A step over so many tokens of one prompt from position `start` on, which draws a token. Linears first wait
        for one thing, then attention for another.
        """
        each = self.layer_elements + self.experts_per_token * self.expert_elements + 2 * self.state_elements
        read = self.layer_elements + self.experts_hit(num_tokens) * self.expert_elements + self.head_elements
        products = num_tokens * each + self.head_elements
        linears = max(read * ELEMENT_BYTES / bandwidth, 2 * products / rate)
        end = start + num_tokens
        pairs = sum(self._keys(context) for context in range(start + 1, end + 1))
        kv_bytes = self._keys(end) * self.kv_width * 2 * ELEMENT_BYTES
        return linears + max(kv_bytes / bandwidth, 4 * pairs * self.query_width / rate)

    def prefill_seconds(self, prompts: int, num_tokens: int, rate: float) -> float:
        """A prefill of prompts of so many tokens. A state takes two products for each token."""
        pairs = sum(self._keys(context) for context in range(1, num_tokens + 1))
        each = self.layer_elements + self.experts_per_token * self.expert_elements + 2 * self.state_elements
        return 2 * prompts * (num_tokens * each + self.head_elements + pairs * self.query_width * 2) / rate

    def experts_hit(self, rows: int) -> float:
        """Returns how many experts of a layer so many tokens hit, if each token's are any of them alike."""
        if not self.num_experts:
            return 0.0
        return self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** rows)

    def _keys(self, context: int) -> int:
        """Returns the keys that a token reads in all layers."""
        return sum(min(context, self.window if kind == "sliding_attention" else context) for kind in self.attending)


def tensor_shapes(path: pathlib.Path) -> dict[str, list[int]]:
    """Returns the shapes of a safetensors file's tensors, by name."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
