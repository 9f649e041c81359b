// The settings as a request, and the request as a curl command and as a program for the `openai` package.

import { ROOT, key } from "./api.js";
import { $ } from "./dom.js";

const NUMBERS = [
  "temperature", "max_tokens", "n", "seed", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
  "repetition_penalty",
];

/** A setting that cannot be sent; `field` is the id of its element. */
export class BadSetting extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/** Returns the JSON in a text area. Throws `BadSetting` that names what is wrong. */
export function jsonOf(field, what) {
  try {
    return JSON.parse($(field).value);
  } catch (error) {
    throw new BadSetting(field, `${what} is not valid JSON: ${error.message}`);
  }
}

/** Returns the schema that the answer must satisfy, or null. */
export function schema() {
  return $("format").value === "json_schema" ? jsonOf("schema", "The schema") : null;
}

/** Returns the body of a request for these messages. What is not set is left out. Throws `BadSetting`. */
export function requestBody(messages) {
  const system = $("system").value.trim();
  const body = {
    model: $("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
  };
  for (const name of NUMBERS) {
    const input = $(name);
    if (!input.validity.valid) throw new BadSetting(name, `${name}: ${input.validationMessage}`);
    if (input.value !== "") body[name] = Number(input.value);
  }
  const stops = $("stop").value.split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  if ($("format").value === "json_object") body.response_format = { type: "json_object" };
  const wanted = schema();
  if (wanted !== null)
    body.response_format = {
      type: "json_schema",
      json_schema: { name: "answer", schema: wanted, strict: $("strict").checked },
    };
  if ($("tools").value.trim()) {
    body.tools = [jsonOf("tools", "The list of tools")].flat();
    body.tool_choice = $("tool_choice").value;
  }
  if ($("show_tokens").checked) {
    body.logprobs = true;
    body.top_logprobs = 5;
    body.return_token_origins = true;
  }
  return body;
}

/** Returns a curl command that streams the answer. */
export function asCurl(body) {
  const data = JSON.stringify({ ...body, stream: true }, null, 2).replaceAll("'", "'\\''");
  const authorization = key() ? ` \\\n  -H "Authorization: Bearer $MANTA_API_KEY"` : "";
  return `curl -N ${ROOT}/v1/chat/completions${authorization} \\\n  -H 'Content-Type: application/json' \\\n  -d '${data}'`;
}

const OPENAI = new Set(
  (
    "model messages temperature max_tokens n seed top_p presence_penalty frequency_penalty stop response_format tools " +
    "tool_choice logprobs top_logprobs"
  ).split(" "),
);

/** Returns a Python program; what the `openai` package does not know goes into `extra_body`. */
export function asPython(body) {
  const known = Object.entries(body).filter(([name]) => OPENAI.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.has(name)));
  const fields = known.map(([name, value]) => `    ${name}=${python(value, 1)},`);
  if (Object.keys(extra).length) fields.push(`    extra_body=${python(extra, 1)},`);
  const secret = key() ? 'os.environ["MANTA_API_KEY"]' : '"none"';
  return [
    ...(key() ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${ROOT}/v1", api_key=${secret})`,
    "stream = client.chat.completions.create(",
    ...fields,
    "    stream=True,",
    ")",
    "for chunk in stream:",
    "    for choice in chunk.choices:",
    '        print(choice.delta.content or "", end="", flush=True)',
    "print()",
  ].join("\n");
}

const WIDTH = 100;

/** Writes a JSON value as Python, on one line if it fits. */
function python(value, depth) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const items = Array.isArray(value)
    ? value.map((each) => python(each, depth + 1))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each, depth + 1)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const line = open + items.join(", ") + close;
  if (line.length + 4 * depth < WIDTH && !line.includes("\n")) return line;
  const pad = "    ".repeat(depth);
  return `${open}\n${items.map((item) => `${pad}    ${item},\n`).join("")}${pad}${close}`;
}
