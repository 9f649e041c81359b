"""`python -m benchmarks.schema_suite TESTS OUT`: the JSON Schema Test Suite as files of `manta bench schemas`.

TESTS is the suite's folder `tests` (github.com/json-schema-org/JSON-Schema-Test-Suite). The source distribution of the
package jsonschema has it as `json/tests`. OUT gets a file for each group of the drafts 4 to 2020-12, without those that
need files from elsewhere, and without the optional ones.
"""

from __future__ import annotations

import json
import pathlib
import sys

DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
ELSEWHERE = ("refRemote",)


def convert(tests: pathlib.Path, to: pathlib.Path) -> int:
    """Writes the groups, and returns their number. A schema that does not name its draft gets the name."""
    number = 0
    to.mkdir(parents=True, exist_ok=True)
    for draft, uri in DRAFTS.items():
        for path in sorted((tests / draft).glob("*.json")):
            for index, group in enumerate(json.loads(path.read_text()) if path.stem not in ELSEWHERE else []):
                schema = group["schema"]
                if isinstance(schema, dict):
                    schema = {"$schema": uri, **schema}
                case = {"description": group["description"], "schema": schema, "tests": group["tests"]}
                (to / f"{draft}---{path.stem}---{index}.json").write_text(json.dumps(case))
                number += 1
    return number


if __name__ == "__main__":
    print(f"{convert(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))} groups")
