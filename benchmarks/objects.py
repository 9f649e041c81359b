"""`manta bench objects`: what it brings and costs to close objects, and to free the order of their properties.

- Instances: how many valid instances of MaskBench's schemas have properties that no schema lists where one lists some,
  so that `additional_properties: closed` excludes them. `jsonschema` judges, by the schema and by Manta's closed one.
- Answers, with `--model`: 64 answers at temperature 1 to prompts about schemas of functions that leave their objects
  open. The prompts name the values in the reverse of the schema's order.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import pathlib
import random
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jsonschema
import referencing

from manta import LLM, SamplingParams
from manta.structured.backends.llguidance_grammar import closed
from manta.structured.constraint import ConstraintError, ConstraintSpec
from manta.structured.schemas.documents import read

CLOSED = ConstraintSpec(kind="json_schema", text="", additional_properties="closed")
READINGS = [("as_schema", "schema"), ("closed", "schema"), ("closed", "any")]
"""Values of `additional_properties` and `property_order`."""
UNJUDGED = (referencing.exceptions.Unresolvable, re.error, RecursionError, OSError, ValueError, TypeError)
"""The exceptions of the judge: for other documents, patterns that are none of Python's, and endless references."""
Case = tuple[dict[str, Any], dict[str, Any]]
"""A schema and a valid instance of it."""
NUM_ANSWERS, MAX_TOKENS, MOST_CHARACTERS = 64, 200, 1500


def accepts(schema: Any, instance: Any) -> bool:
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    accepted: bool = validator(schema).is_valid(instance)
    return accepted


class Counts(NamedTuple):
    valid: int
    """Instances that the schema takes."""
    excluded: int
    """Those of them that it does not take with its objects closed."""


def count_instances(file: pathlib.Path) -> Counts:
    """Judges the instances of one schema. Those that the judge cannot judge, for lack of another document, are left
    out, and so are schemas that Manta refuses to close.
    """
    data = json.loads(file.read_text())
    schema, cases = data["schema"], [case["data"] for case in data["tests"] if case["valid"]]
    valid = [instance for instance in cases if judged(schema, instance)]
    with contextlib.suppress(ConstraintError):
        if (reading := closed(schema, CLOSED)) is not schema:
            as_read = read(schema).as_schema()
            return Counts(len(valid), sum(judged(as_read, each) and not judged(reading, each) for each in valid))
    return Counts(len(valid), 0)


def judged(schema: Any, instance: Any) -> bool:
    try:
        return accepts(schema, instance)
    except UNJUDGED:
        return False


def function_cases(files: Sequence[pathlib.Path]) -> Iterator[Case]:
    """Yields schemas of functions in a fixed random order."""
    chosen = [file for file in files if file.name.startswith("Glaiveai2K")]
    random.Random(3).shuffle(chosen)
    for file in chosen:
        data = json.loads(file.read_text())
        text, valid = json.dumps(data["schema"]), [case["data"] for case in data["tests"] if case["valid"]]
        is_open = "additionalProperties" not in text and len(data["schema"].get("properties", {})) > 1
        if is_open and valid and len(text) <= MOST_CHARACTERS:
            yield data["schema"], valid[0]


def answer_counts(llm: LLM, cases: Sequence[Case], reading: tuple[str, str]) -> list[int]:
    """Returns how many answers end, are valid, and have properties of their own or in another order."""
    num_ended = num_valid = num_invented = num_reordered = 0
    for seed, (schema, instance) in enumerate(cases):
        values = "; ".join(f"{name} is {value}" for name, value in reversed(instance.items()))
        ask = f"Write the arguments of the function as JSON. Schema: {json.dumps(schema)}\nValues: {values}"
        (output,) = llm.chat(
            [[{"role": "user", "content": ask}]],
            [SamplingParams(temperature=1.0, seed=seed, max_tokens=MAX_TOKENS)],
            response_format={"type": "json_schema", "json_schema": {"name": "function", "schema": schema}},
            additional_properties=reading[0],
            property_order=reading[1],
            use_tqdm=False,
        )
        try:
            answer = json.loads(output.outputs[0].text)
        except ValueError:  # it did not end
            continue
        names = list(schema["properties"])
        num_ended += 1
        num_valid += accepts(schema, answer)
        num_invented += not answer.keys() <= set(names)
        num_reordered += [name for name in answer if name in names] != [name for name in names if name in answer]
    return [num_ended, num_valid, num_invented, num_reordered]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="manta bench objects", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of MaskBench's files")
    parser.add_argument("--model", help="a model that answers; without it instances are counted only")
    parser.add_argument("--answers", type=int, default=NUM_ANSWERS, help="number of answers by each reading")
    options = parser.parse_args(arguments)
    files = sorted(options.data.glob("*.json"))
    print("| schemas of | valid instances | excluded by closing | schemas with an excluded one |")
    print("| --- | --- | --- | --- |")
    by_source = collections.defaultdict(list)
    for file in files:
        by_source[re.split(r"[\d_-]", file.name)[0]].append(count_instances(file))
    by_source["all"] = [counts for of_source in list(by_source.values()) for counts in of_source]
    for source, found in by_source.items():
        sums = [sum(column) for column in zip(*found, strict=True)]
        print(f"| {source} | {sums[0]:,} | {sums[1]:,} | {sum(each.excluded > 0 for each in found):,} |")
    if options.model is not None:
        cases = [case for case, _ in zip(function_cases(files), range(options.answers), strict=False)]
        llm = LLM(options.model)
        print("| additional_properties | property_order | ended | valid | with invented names | in another order |")
        print("| --- | --- | --- | --- | --- | --- |")
        for reading in READINGS:
            print(f"| {' | '.join(map(str, [*reading, *answer_counts(llm, cases, reading)]))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
