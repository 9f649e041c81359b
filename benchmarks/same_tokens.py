"""`manta bench same-tokens --peer-checkout PATH`: whether another commit's checkout gives the same tokens, bit for bit.

Both generate a fixed set: each model family in each setting of the engine (tiny KV cache, small steps, drafts, overlap,
two ranks) is asked in each way (greedy, seeded, filters, constraints, several choices). Run it after a change that
should change no token. Models are tiny and random; each engine has a process of its own.

This file is also the child: it runs by path with the checkout to be tested on `PYTHONPATH`, and so imports only what
every checkout has.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3", "gpt_neox")
DRAFT_FAMILY = "qwen2"
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tiny KV cache": {"kv_cache_bytes": 320_000, "max_num_batched_tokens": 48},
    "small steps": {"max_num_batched_tokens": 11, "max_num_sequences": 5},
    "n-grams": {"speculative": {"proposers": ["ngram"]}},
    "draft model": {"speculative": {"proposers": ["draft"], "draft_model": ""}},
    "overlap": {"overlap": "on"},
    "two ranks": {"tensor_parallel_size": 2},
}
"""Options of the engine; the folder of the draft model is filled in."""

_PERSON = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}}}'
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1, "seed": 7},
    "filters": {"temperature": 1.3, "seed": 8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.7},
    "choices": {"temperature": 1, "seed": 9, "n": 3},
    "regex": {"temperature": 1, "seed": 10, "constraint": {"kind": "regex", "text": "(yes|no)( [a-z]{1,9}){2,5}"}},
    "schema": {"temperature": 0.8, "seed": 11, "constraint": {"kind": "json_schema", "text": _PERSON}},
}
NUM_TOKENS = 24


def make_prompts() -> list[list[int]]:
    """Returns eight prompts of 5 to 70 tokens; four of them share their first 40."""
    source = random.Random(0)
    shared = [source.randrange(3, 256) for _ in range(40)]
    own = [[source.randrange(3, 256) for _ in range(count)] for count in (5, 17, 30, 64)]
    return own + [shared + each[:count] for each, count in zip(own, (1, 9, 20, 30), strict=True)]


def generate(options: dict[str, Any]) -> dict[str, list[list[list[int]]]]:
    """Returns the tokens of each choice of each prompt, for each way of asking. All are asked at once."""
    from manta.cluster.llm import LLM, ConstraintSpec, SamplingParams

    prompts = make_prompts()
    params = []
    for asked in ASKED.values():
        given = dict(asked)
        if "constraint" in given:
            given["constraint"] = ConstraintSpec(**given["constraint"])
        params.append(SamplingParams(max_tokens=NUM_TOKENS, **given))
    llm = LLM(max_model_len=128, dtype="float32", **options)
    outputs = llm.generate(prompts * len(params), [each for each in params for _ in prompts])
    tokens = [[list(choice.token_ids) for choice in output.outputs] for output in outputs]
    count = len(prompts)
    return {name: tokens[index * count : (index + 1) * count] for index, name in enumerate(ASKED)}


def generate_in(checkout: pathlib.Path, options: dict[str, Any]) -> dict[str, Any]:
    """`generate` with the code of a checkout, in a fresh process. Raises `RuntimeError` with what it printed."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-P", str(pathlib.Path(__file__).resolve()), "--child", json.dumps(options)]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{checkout} with {options} ended with {done.returncode}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Returns where the tokens of two checkouts differ: way of asking, prompt, choice, position."""
    found = []
    for name in ours:
        for prompt, (here, there) in enumerate(zip(ours[name], theirs[name], strict=True)):
            for choice, (own, other) in enumerate(zip(here, there, strict=True)):
                if own != other:
                    pairs = enumerate(zip(own, other, strict=False))
                    position = next((at for at, (one, two) in pairs if one != two), min(len(own), len(other)))
                    found.append(f"{name}, prompt {prompt}, choice {choice}, token {position}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each engine; returns 1 if any token differs."""
    if sys.argv[1:2] == ["--child"] and arguments is None:
        print(json.dumps(generate(json.loads(sys.argv[2]))))
        return 0
    parser = argparse.ArgumentParser(prog="manta bench same-tokens", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peer-checkout", required=True, metavar="PATH", help="code of the other commit")
    parser.add_argument("--families", default=",".join(FAMILIES), help="(default: %(default)s)")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    peer = pathlib.Path(options.peer_checkout).expanduser().resolve()
    if not (peer / "cluster" / "llm.py").is_file():
        parser.error(f"--peer-checkout {peer}: that is no checkout of Manta")
    families, settings = options.families.split(","), options.settings.split(",")
    for given, known in ((families, FAMILIES), (settings, tuple(SETTINGS))):
        if unknown := [each for each in given if each not in known]:
            parser.error(f"{unknown[0]!r} is none of {', '.join(known)}")
    num_different = compare(peer, families, settings)
    print(f"\n{num_different} differ" if num_different else "\nall tokens are the same")
    return int(num_different > 0)


def compare(peer: pathlib.Path, families: list[str], settings: list[str]) -> int:
    """Prints a row for each engine, and returns the number of choices that differ."""
    from benchmarks.report import markdown_head, markdown_row
    from tests.checkpoints import checkpoint

    markdown_head("family", "setting", "tokens", "choices that differ", "the first")
    total = 0
    for family in families:
        for name in settings:
            if family == "gpt_neox" and name == "two ranks":
                continue  # transformers' models are not split
            options = {"model": str(checkpoint(family)), **SETTINGS[name]}
            if name == "draft model":
                options["speculative"] = SETTINGS[name]["speculative"] | {"draft_model": str(checkpoint(DRAFT_FAMILY))}
            ours, theirs = generate_in(ROOT, options), generate_in(peer, options)
            found = differences(ours, theirs)
            count = sum(len(choice) for prompts in ours.values() for each in prompts for choice in each)
            markdown_row(family, name, count, len(found), next(iter(found), ""))
            total += len(found)
    return total


if __name__ == "__main__":
    sys.exit(main())
