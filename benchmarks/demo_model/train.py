"""Trains the demo model and its draft on `data.py`'s stream and writes Hugging Face folders into `configs/demo/`.

`python -m benchmarks.demo_model.train --minutes 20`; see README.md beside this file. Seeded: the same number of steps
gives the same data in the same order; the number of steps is what the time allows, unless `--steps` fixes it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Iterator

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.demo_model.data import SEAM, TRAIN, Sample, samples

OUTPUT = pathlib.Path(__file__).resolve().parents[2] / "configs" / "demo"
MAX_VOCAB_SIZE = 4096
PIECES = r"""\p{L}+|\p{N}|[^\s\p{L}\p{N}]+(?: [\[{"]+)?|\s"""
END = "<|im_end|>"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", END, "<think>", "</think>", "<tool_call>", "</tool_call>"]
CHAT_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages and messages[0].role == 'system' %}"
    "{{- messages[0].content + '\\n' }}{%- endif %}{{- 'Tools:' }}"
    "{%- for tool in tools %}{{- '\\n' + (tool.function | tojson) }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{%- if not (tools and loop.first and message.role == 'system') %}"
    "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}{{- '<tool_call>{\"name\": ' + (call.function.name | tojson) }}"
    "{{- ', \"arguments\": ' + (call.function.arguments | tojson) + '}</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TARGET = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
DRAFT = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 3}
STEP_TOKENS = 4096
BATCH_TOKENS = 1024
"""A batch holds texts of about one length, so that little of it is padding; a step adds up batches of every length, for
texts of one length are of few tasks.
"""
CHUNK = 1024
"""Samples that are sorted by length together."""
WRITTEN = re.compile(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", re.DOTALL)
"""Finds the assistant's text in a rendered conversation."""
LENGTH_MULTIPLE = 16
"""Batches are padded to this, so that the CPU's kernels meet few shapes."""
PEAK_LR = 3e-3


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose pieces a small model can copy.

    Every digit is a token, and a word has no space in front: it is the same tokens in a sentence and behind a quote.
    JSON's punctuation runs, such as `", "`, are words of their own.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=20,
    )
    texts = (sample.messages[0]["content"] + "\n" + sample.answer for sample in itertools.islice(samples(1), 30_000))
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = 1024
    return fast


def encode(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation with its answer, and which of them the assistant wrote: those are learnt."""
    prompt = tokenizer.apply_chat_template(
        sample.messages, tools=sample.tools, add_generation_prompt=True, tokenize=False
    )
    ids, written = [], []
    for index, part in enumerate(WRITTEN.split(prompt + sample.answer + END)):
        tokens = _token_ids(tokenizer, part)
        ids += tokens
        written += [index % 2 == 1] * len(tokens)
    return ids, written


def _token_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return [token_id for part in tokenizer(text.split(SEAM), add_special_tokens=False).input_ids for token_id in part]


def step_batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """The batches of each step: (input ids, labels) [rows, length], int64, padded on the right; labels are -100 except
    on what the assistant wrote.
    """
    pieces = tuple(sorted(token for token in tokenizer.get_vocab() if token.isascii() and token.isalpha()))
    stream = samples(seed, TRAIN._replace(pieces=pieces))
    order = torch.Generator().manual_seed(seed)
    while True:
        chunk = sorted((encode(tokenizer, next(stream)) for _ in range(CHUNK)), key=lambda item: len(item[0]))
        groups: list[list[tuple[list[int], list[bool]]]] = [[]]
        for item in chunk:
            if (len(groups[-1]) + 1) * len(item[0]) > BATCH_TOKENS:
                groups.append([])
            groups[-1].append(item)
        num_steps = max(1, len(groups) * BATCH_TOKENS // STEP_TOKENS)
        for first in torch.randperm(num_steps, generator=order).tolist():
            yield [padded(group) for group in groups[first::num_steps]]


def padded(group: list[tuple[list[int], list[bool]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(input ids, labels) of texts of which the last is the longest."""
    length = -(-len(group[-1][0]) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    ids = torch.zeros(len(group), length, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, (tokens, written) in enumerate(group):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, : len(tokens)] = torch.where(torch.tensor(written), ids[row, : len(tokens)], -100)
    return ids, labels


def make_model(shape: dict[str, int], tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(  # type: ignore[call-arg]  # its base class takes two of these
        vocab_size=-(-len(tokenizer) // 64) * 64,
        num_key_value_heads=shape["num_attention_heads"],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_theta=10_000.0,
        attn_implementation="eager",  # at these lengths 1.4 x the speed of torch's fused attention in training
        **shape,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def answer_logits(
    model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits before each answer token, and those tokens; the head runs on nothing else."""
    hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    chosen = targets != -100
    return model.lm_head(hidden[chosen]), targets[chosen]


def summed_loss(
    model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor, teacher: LlamaForCausalLM | None
) -> torch.Tensor:
    """Cross entropy of a batch's answer tokens, and their divergence from the teacher's distribution: sums, float32."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        logits, targets = answer_logits(model, ids, labels)
        loss = F.cross_entropy(logits.float(), targets, reduction="sum")
        if teacher is not None:
            with torch.no_grad():
                wanted, _ = answer_logits(teacher, ids, labels)
            loss = loss + F.kl_div(
                logits.float().log_softmax(-1), wanted.float().log_softmax(-1), log_target=True, reduction="sum"
            )
    return loss


def train(
    name: str,
    shape: dict[str, int],
    tokenizer: PreTrainedTokenizerFast,
    minutes: float,
    steps: int | None,
    teacher: LlamaForCausalLM | None = None,
    first: pathlib.Path | None = None,
    seed: int = 2,
    peak_lr: float = PEAK_LR,
) -> LlamaForCausalLM:
    """Trains for a time or a number of steps, from `first` if given; a draft learns its teacher's distribution beside
    the answers.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(shape, tokenizer)
    if first is not None:
        model.load_state_dict(LlamaForCausalLM.from_pretrained(first, dtype=torch.float32).state_dict())
    model.to(device)
    hidden = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n and "lm_head" not in n]
    others = [p for n, p in model.named_parameters() if not any(p is q for q in hidden)]
    optimizers = [
        torch.optim.Muon(hidden, lr=peak_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    stream = step_batches(tokenizer, seed)
    used, step, tokens, started = 0.0, 0, 0, time.perf_counter()
    smoothed = 0.0
    while True:
        done = step / steps if steps else used / (60 * minutes)
        if done >= 1:
            break
        rate = peak_lr * min(1.0, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * done) if done > 0.1 else 1.0)
        batches = [(ids.to(device), labels.to(device)) for ids, labels in next(stream)]
        num_targets = sum(int((labels[:, 1:] != -100).sum()) for _, labels in batches)
        mean = 0.0
        for ids, labels in batches:
            loss = summed_loss(model, ids, labels, teacher) / num_targets
            loss.backward()
            mean += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        smoothed = mean if step == 0 else 0.98 * smoothed + 0.02 * mean
        tokens += sum(ids.numel() for ids, _ in batches)
        step += 1
        used = time.perf_counter() - started
        if step % 50 == 0:
            print(f"{name} step {step} {used:.0f} s {tokens / used:.0f} tok/s loss {smoothed:.4f}", flush=True)
    print(json.dumps({"model": name, "steps": step, "tokens": tokens, "seconds": round(used), "loss": smoothed}))
    return model


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: pathlib.Path) -> None:
    model.to("cpu", torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=20, help="time for the target; the draft gets a quarter of it more"
    )
    parser.add_argument("--steps", type=int, help="train the target for this many steps instead, the draft for as many")
    parser.add_argument("--first", type=pathlib.Path, help="go on from the models in this folder, with their tokenizer")
    parser.add_argument("--seed", type=int, default=2, help="of the data; another one to go on with")
    parser.add_argument("--learning-rate", type=float, default=PEAK_LR, help="at its peak; a lower one to go on with")
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    options = parser.parse_args()
    given = {name: options.first and options.first / name for name in ("target", "draft")}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(given["target"]) if options.first else train_tokenizer()
    common = {"steps": options.steps, "seed": options.seed, "peak_lr": options.learning_rate}
    target = train("target", TARGET, tokenizer, options.minutes, first=given["target"], **common)
    save(target, tokenizer, options.output / "target")
    target = target.float()
    draft = train("draft", DRAFT, tokenizer, options.minutes / 4, teacher=target, first=given["draft"], **common)
    save(draft, tokenizer, options.output / "draft")


if __name__ == "__main__":
    main()
