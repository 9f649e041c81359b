// Elements, messages to screen readers, and copying. Nothing here, or anywhere on the page, writes HTML from text.

export const $ = (id) => document.getElementById(id);

/** Makes an element. Properties of `given` that are no properties of the element become attributes. */
export function make(tag, given = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null) continue;
    if (name in element && !name.startsWith("aria")) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Lets screen readers say one sentence; a stream's pieces would be too many. */
export function announce(sentence) {
  $("announcements").textContent = sentence;
}

/** Makes a button that copies what `text()` returns. */
export function copyButton(text, label = "Copy") {
  const button = make("button", { type: "button", className: "quiet copy" }, label);
  button.addEventListener("click", async () => {
    await copy(text());
    button.textContent = "Copied";
    announce("Copied");
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}

/** Browsers offer their clipboard to https and localhost only; elsewhere a selection is copied. */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = make("textarea", { value: text, className: "hidden" });
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Puts a text with Markdown's fences and `code` into an element; everything else stays as it is written. */
export function showProse(element, text) {
  const parts = [];
  text.split(/^```.*$/m).forEach((block, index) => {
    if (index % 2) parts.push(make("pre", { tabIndex: 0 }, make("code", {}, block.replace(/^\n|\n$/g, ""))));
    else
      block.split(/`([^`\n]+)`/).forEach((run, place) => {
        if (run) parts.push(place % 2 ? make("code", {}, run) : run);
      });
  });
  element.replaceChildren(...parts);
}
