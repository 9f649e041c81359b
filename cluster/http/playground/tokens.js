// The tokens of an answer: where each came from, and what else the model might have said. They make one list box, so
// that the arrow keys walk from token to token.

import { $, make } from "./dom.js";

const ORIGINS = {
  forced: "forced by the grammar",
  prediction: "an accepted draft from the request's prediction",
  history: "an accepted draft from an earlier answer",
  ngram: "an accepted draft from the text before",
  draft: "an accepted draft of the draft model",
  mtp: "an accepted draft of the model's draft head",
  eagle3: "an accepted draft of an EAGLE-3 head",
};
let lists = 0;

export class TokenList {
  constructor(label) {
    this.entries = [];
    this.active = -1;
    this.id = `tokens-${++lists}`;
    this.element = make("div", { className: "tokens", role: "listbox", "aria-label": label, tabIndex: 0 });
    this.element.addEventListener("pointerover", (event) => this.#point(event));
    this.element.addEventListener("pointerleave", hide);
    this.element.addEventListener("blur", hide);
    this.element.addEventListener("focus", () => this.entries.length && this.#activate(Math.max(0, this.active)));
    this.element.addEventListener("keydown", (event) => this.#walk(event));
  }

  /** Appends entries of OpenAI's `logprobs.content`. */
  append(entries) {
    for (const entry of entries) {
      const place = this.entries.push(entry) - 1;
      const kind = entry.origin === "forced" ? "forced" : entry.origin in ORIGINS ? "draft" : "drawn";
      const token = make("span", { className: `token ${kind}`, role: "option", id: `${this.id}-${place}` });
      token.textContent = visible(entry.token);
      token.setAttribute("aria-label", sentence(entry));
      token.setAttribute("aria-selected", "false");
      token.style.setProperty("--doubt", (1 - Math.exp(entry.logprob)).toFixed(2));
      this.element.append(token, entry.token.includes("\n") ? "\n" : "");
    }
  }

  #point(event) {
    const place = [...this.element.children].indexOf(event.target.closest(".token"));
    if (place >= 0) show(this.element.children[place], this.entries[place]);
  }

  #activate(place) {
    const tokens = this.element.children;
    tokens[this.active]?.setAttribute("aria-selected", "false");
    this.active = place;
    tokens[place].setAttribute("aria-selected", "true");
    this.element.setAttribute("aria-activedescendant", tokens[place].id);
    tokens[place].scrollIntoView({ block: "nearest" });
    show(tokens[place], this.entries[place]);
  }

  #walk(event) {
    const last = this.entries.length - 1;
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") return hide();
    if (event.ctrlKey || event.metaKey || last < 0) return;
    if (step) this.#activate(Math.min(last, Math.max(0, this.active + step)));
    else if (event.key === "Home") this.#activate(0);
    else if (event.key === "End") this.#activate(last);
    else return;
    event.preventDefault();
  }
}

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 0.1 ? `${share.toFixed(share < 10 ? 1 : 0)}%` : "<0.1%";
};
const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
const withSpaces = (text) => visible(text).replaceAll(" ", "␣");

function sentence(entry) {
  const others = entry.top_logprobs.map((each) => `${visible(each.token)} ${percent(each.logprob)}`).join(", ");
  const origin = ORIGINS[entry.origin] ?? "drawn by the model";
  return `${visible(entry.token)}, ${percent(entry.logprob)}, ${origin}${others ? `; likely were ${others}` : ""}`;
}

function show(token, entry) {
  const card = $("alternatives");
  const isAmongThem = entry.top_logprobs.some((each) => each.token === entry.token);
  const rows = [...entry.top_logprobs, ...(isAmongThem ? [] : [entry])].map((each) => {
    const bar = make("span", { className: "bar" });
    bar.style.setProperty("--share", Math.exp(each.logprob).toFixed(3));
    const row = make("li", {}, make("code", {}, withSpaces(each.token)), bar, make("span", {}, percent(each.logprob)));
    row.classList.toggle("chosen", each.token === entry.token);
    return row;
  });
  const origin = ORIGINS[entry.origin] ?? "drawn by the model";
  card.replaceChildren(make("p", { className: "muted" }, origin), make("ol", {}, ...rows));
  card.hidden = false;
  const at = token.getBoundingClientRect();
  const size = card.getBoundingClientRect();
  const below = at.bottom + 8;
  card.style.left = `${Math.max(8, Math.min(at.left, innerWidth - size.width - 8))}px`;
  card.style.top = `${below + size.height < innerHeight ? below : Math.max(8, at.top - size.height - 8)}px`;
}

export function hide() {
  $("alternatives").hidden = true;
}
