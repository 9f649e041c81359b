// One answer of the model: its choices side by side, each with text, tokens, tool calls and what was checked.

import { copyButton, make, showProse } from "./dom.js";
import { mistakes, unchecked } from "./schema.js";
import { TokenList } from "./tokens.js";

const ENDINGS = { length: "cut off at its token limit", error: "failed", stopped: "stopped by you" };

class Choice {
  constructor(index, count, request) {
    this.request = request;
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.finish = null;
    this.text = make("div", { className: request.response_format ? "text mono" : "text" });
    this.thought = make("div", { className: "text" });
    this.thinking = make("details", { className: "thinking", hidden: true }, make("summary", {}, "Reasoning"), this.thought);
    this.tokens = request.logprobs ? new TokenList(`Tokens of answer ${index + 1}; the arrow keys walk through them`) : null;
    this.callList = make("div", { className: "calls" });
    this.notes = make("div", { className: "notes" });
    this.pick = make("button", { type: "button", className: "quiet pick", hidden: true }, "Choose");
    const title = count > 1 ? make("h3", {}, `Answer ${index + 1}`) : null;
    const head = title && make("header", {}, title, this.pick);
    this.element = make(
      "article",
      { className: "choice", "aria-label": count > 1 ? `Answer ${index + 1} of ${count}` : "Answer", "aria-busy": "true" },
      head, this.thinking, this.text, this.tokens?.element, this.callList, this.notes,
    );
  }

  feed({ delta, logprobs, finish_reason: finish }) {
    this.content += delta.content ?? "";
    this.reasoning += delta.reasoning_content ?? "";
    for (const part of delta.tool_calls ?? []) {
      const call = (this.calls[part.index] ??= emptyCall(part));
      call.id ||= part.id ?? "";
      for (const [field, text] of Object.entries(part[call.type] ?? {})) call[call.type][field] += text;
    }
    if (this.tokens && logprobs) this.tokens.append(logprobs.content);
    if (finish) this.finish = finish;
  }

  draw() {
    if (!this.tokens?.entries.length) showProse(this.text, this.content);
    this.thinking.hidden = !this.reasoning;
    this.thought.textContent = this.reasoning;
    this.callList.replaceChildren(...this.calls.map((call) => callCard(call)));
  }

  /** Shows how the choice ended, and whether it satisfies the schema. */
  end(finish, schema) {
    this.finish ??= finish;
    this.draw();
    this.element.setAttribute("aria-busy", "false");
    if (this.finish in ENDINGS) this.note(`This answer was ${ENDINGS[this.finish]}.`, "warning");
    if (schema !== null && this.finish === "stop" && !this.calls.length) this.#check(schema);
    const copied = () => this.content || JSON.stringify(this.calls.map((call) => call[call.type]), null, 2);
    if (this.content || this.calls.length) this.notes.append(copyButton(copied));
  }

  note(text, kind) {
    this.notes.append(make("p", { className: `note ${kind}` }, text));
  }

  #check(schema) {
    try {
      const wrong = mistakes(schema, JSON.parse(this.content));
      if (wrong.length) this.note(`Breaks the schema: ${wrong.join("; ")}`, "bad");
      else this.note("Satisfies the schema", "good");
    } catch (error) {
      this.note(`Could not be checked: ${error.message}`, "bad");
    }
    const left = unchecked(schema);
    if (left.length) this.note(`This page does not check ${left.join(", ")}`, "warning");
  }

  get message() {
    const calls = this.calls.length ? { tool_calls: this.calls } : {};
    return { role: "assistant", content: this.content || (this.calls.length ? null : ""), ...calls };
  }
}

/** A call without its text, of a function or of a custom tool, as its first part says. */
function emptyCall(part) {
  const texts = part.custom ? { custom: { name: "", input: "" } } : { function: { name: "", arguments: "" } };
  return { id: "", type: part.custom ? "custom" : "function", ...texts };
}

function callCard(call) {
  let shown = call.function?.arguments ?? call.custom.input;
  try {
    shown = JSON.stringify(JSON.parse(shown), null, 2);
  } catch {} // it is still arriving
  const title = make("p", {}, make("span", { className: "muted" }, "calls "), make("strong", {}, call[call.type].name));
  return make("div", { className: "call" }, title, make("pre", { tabIndex: 0 }, make("code", {}, shown)));
}

export class Answer {
  /** `onResults` is called with the tools' messages. `onDraw` may be set; it is called after each change. */
  constructor(request, schema, onResults) {
    const count = request.n ?? 1;
    this.schema = schema;
    this.onResults = onResults;
    this.picked = 0;
    this.choices = Array.from({ length: count }, (_, index) => new Choice(index, count, request));
    this.columns = make("div", { className: "choices" }, ...this.choices.map((choice) => choice.element));
    this.columns.classList.toggle("several", count > 1);
    this.columns.classList.toggle("many", count > 2);
    this.meta = make("p", { className: "meta muted" });
    const legend = request.logprobs ? [legendOfTokens()] : [];
    this.element = make(
      "li", { className: "turn answer" }, make("h2", { className: "hidden" }, "Manta"), this.columns, ...legend, this.meta,
    );
    this.choices.forEach((choice, index) =>
      choice.pick.addEventListener("click", () => this.#pick(index)),
    );
    this.frame = 0;
  }

  get message() {
    return this.choices[this.picked].message;
  }

  get isEmpty() {
    return this.choices.every((choice) => !choice.content && !choice.calls.length && !choice.reasoning);
  }

  feed(chunk) {
    for (const choice of chunk.choices) this.choices[choice.index].feed(choice);
    this.frame ||= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.frame = 0;
    this.choices.forEach((choice) => choice.draw());
    this.onDraw?.();
  }

  /** `finish` is that of choices that did not say how they ended; `notEnforced` what the server does not enforce. */
  end(finish, notEnforced, summary) {
    cancelAnimationFrame(this.frame);
    this.choices.forEach((choice) => choice.end(finish, this.schema));
    if (notEnforced) this.choices.forEach((choice) => choice.note(`The server does not enforce ${notEnforced}`, "warning"));
    this.meta.textContent = summary;
    if (this.choices.length > 1) this.#pick(0);
    else this.#askForResults();
  }

  #pick(index) {
    this.picked = index;
    this.choices.forEach((choice, each) => {
      choice.pick.hidden = false;
      choice.pick.textContent = each === index ? "Chosen" : "Choose";
      choice.pick.setAttribute("aria-pressed", String(each === index));
      choice.element.classList.toggle("picked", each === index);
    });
    this.#askForResults();
  }

  /** Asks for the results of the picked choice's calls. */
  #askForResults() {
    this.results?.remove();
    const { calls, finish } = this.choices[this.picked];
    if (finish !== "tool_calls" && finish !== "stop") return;
    if (!calls.length) return;
    const areas = calls.map((call) =>
      make("textarea", { rows: 2, required: true, placeholder: `What ${call[call.type].name} answers` }),
    );
    const fields = areas.map((area, index) =>
      make("label", {}, make("span", {}, `Result of ${calls[index][calls[index].type].name}`), area),
    );
    this.results = make("form", { className: "results" }, ...fields, make("button", { className: "main" }, "Send result"));
    this.results.addEventListener("submit", (event) => {
      event.preventDefault();
      this.results.remove();
      this.onResults(
        calls.map((call, index) => ({ role: "tool", tool_call_id: call.id, content: areas[index].value })),
      );
    });
    this.element.append(this.results);
    areas[0].focus();
  }
}

function legendOfTokens() {
  const kind = (name, text) => make("span", { className: `token ${name}` }, text);
  return make(
    "p", { className: "legend muted" },
    kind("forced", "forced by the grammar"), " ", kind("draft", "accepted draft"), " ",
    make("span", { className: "token drawn doubt" }, "unlikely"),
  );
}
