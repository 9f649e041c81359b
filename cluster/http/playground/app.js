// The page: what its controls do, and the conversation. Each part has a module of its own.

import { Answer } from "./answer.js";
import { key, models, setKey, streamChat } from "./api.js";
import { $, announce, copyButton, make } from "./dom.js";
import { EXAMPLES, ORDER, WEATHER } from "./examples.js";
import { BadSetting, asCurl, asPython, requestBody, schema } from "./request.js";
import { Strip } from "./strip.js";

const strip = new Strip();
/** What was said so far: messages, and answers of which one choice is picked. */
let turns = [];
/** Stops the answer that is being streamed; null if none is. */
let stopping = null;

const messages = () => turns.map((turn) => (turn instanceof Answer ? turn.message : turn));

// ---- the conversation ----------------------------------------------------------------------------------------------

async function say(text) {
  if (stopping || !text || !settingsAreRight()) return;
  turns.push({ role: "user", content: text });
  $("prompt").value = "";
  fit($("prompt"));
  show(make("li", { className: "turn user" }, make("h2", { className: "hidden" }, "You"), make("p", {}, text)));
  await ask();
}

function show(element) {
  $("welcome").hidden = true;
  $("turns").append(element);
  $("conversation").scrollTop = $("conversation").scrollHeight;
}

/** Asks the model to answer the conversation, and streams its answer into the page. */
async function ask() {
  const request = requestBody(messages());
  const conversation = turns;
  const answer = new Answer(request, schema(), goOnWith);
  answer.onDraw = keepInView();
  stopping = new AbortController();
  document.querySelectorAll(".pick").forEach((button) => (button.disabled = true));
  document.querySelectorAll(".failure button, .results").forEach((offer) => offer.remove()); // they would ask beside this
  show(answer.element);
  setBusy(true);
  strip.begin();
  let response = null;
  let usage = null;
  try {
    const streamed = { ...request, stream: true, stream_options: { include_usage: true }, return_token_ids: true };
    await streamChat(streamed, stopping.signal, (begun) => (response = begun), (chunk) => {
      for (const choice of chunk.choices) strip.add(choice.token_ids?.length);
      usage = chunk.usage ?? usage;
      answer.feed(chunk);
    });
    finish(answer, "stop", response, usage);
  } catch (error) {
    if (conversation !== turns) return; // a new chat has begun
    if (error.name === "AbortError") finish(answer, "stopped", response, usage);
    else await fail(answer, error, response);
  }
}

function finish(answer, ending, response, usage) {
  setBusy(false);
  answer.end(ending, response?.headers.get("x-manta-not-enforced"), strip.end(usage));
  if (answer.isEmpty && ending === "stopped") answer.element.remove();
  else turns.push(answer);
  announce(ending === "stopped" ? "Stopped" : `Manta: ${answer.message.content ?? "calls a tool"}`);
  answer.onDraw();
}

/** Shows what went wrong. Asks for a key where one is missing, and then again for the answer. */
async function fail(answer, error, response) {
  setBusy(false);
  if (response === null) answer.element.remove();
  else answer.end("error", null, strip.end(null));
  const conversation = turns;
  if (error.status === 401 && (await askForKey(error.message))) {
    if (stopping || conversation !== turns) return; // the reader has asked something else meanwhile
    return ask();
  }
  const again = make("button", { type: "button", className: "quiet" }, "Try again");
  const shown = make("li", { className: "turn failure", role: "alert" }, make("p", {}, error.message), again);
  again.addEventListener("click", () => {
    shown.remove();
    if (response !== null) answer.element.remove();
    if (settingsAreRight()) ask();
  });
  show(shown);
}

function goOnWith(results) {
  if (!settingsAreRight()) return;
  turns.push(...results);
  for (const { content } of results)
    show(make("li", { className: "turn user tool" }, make("h2", { className: "hidden" }, "Tool result"), make("p", {}, content)));
  ask();
}

function setBusy(isBusy) {
  if (!isBusy) stopping = null;
  $("send").hidden = isBusy;
  $("stop_answer").hidden = !isBusy;
  document.body.classList.toggle("busy", isBusy);
  if (isBusy) announce("Manta answers");
}

/** Returns a function that scrolls to the newest text, unless the reader has scrolled away. */
function keepInView() {
  const view = $("conversation");
  let at = null;
  return () => {
    if (at === null || view.scrollTop >= at - 40) {
      view.scrollTop = view.scrollHeight;
      at = view.scrollTop;
    }
  };
}

function reset() {
  stopping?.abort();
  setBusy(false);
  turns = [];
  $("turns").replaceChildren();
  $("welcome").hidden = false;
  $("prompt").focus();
}

// ---- the settings --------------------------------------------------------------------------------------------------

/** Returns whether the settings make a request; otherwise shows the one that does not. */
function settingsAreRight() {
  document.querySelectorAll("#settings [aria-invalid]").forEach((each) => each.removeAttribute("aria-invalid"));
  $("settings_error").textContent = "";
  try {
    requestBody(messages());
    return true;
  } catch (error) {
    if (!(error instanceof BadSetting)) throw error;
    const field = $(error.field);
    openSettings(true);
    for (let group = field.closest("details"); group; group = group.parentElement.closest("details")) group.open = true;
    field.setAttribute("aria-invalid", "true");
    $("settings_error").textContent = error.message;
    field.focus();
    return false;
  }
}

function set(settings) {
  for (const [id, value] of Object.entries(settings))
    if (typeof value === "boolean") $(id).checked = value;
    else $(id).value = value;
  showSettings();
}

const NONE = { system: "", n: "", format: "text", tools: "", show_tokens: false };
/** Settings that change what comes back, each with its name beside the composer and the value that ends it. */
const CHIPS = {
  system: () => $("system").value.trim() && "System prompt",
  n: () => Number($("n").value) > 1 && `${$("n").value} answers`,
  format: () => ({ json_object: "JSON", json_schema: "JSON schema" })[$("format").value],
  tools: () => $("tools").value.trim() && "Tools",
  show_tokens: () => $("show_tokens").checked && "Tokens",
};

function showSettings() {
  $("schema_part").hidden = $("format").value !== "json_schema";
  const chips = Object.entries(CHIPS).map(([id, name]) => name() && chip(id, name()));
  $("chips").replaceChildren(...chips.filter(Boolean));
}

function chip(id, name) {
  const button = make("button", { type: "button", className: "chip", "aria-label": `${name}: turn off` }, name);
  button.addEventListener("click", () => {
    set({ [id]: NONE[id] });
    $("prompt").focus();
  });
  return button;
}

const isNarrow = matchMedia("(max-width: 60rem)");

function openSettings(isOpen) {
  document.body.classList.toggle("with-settings", isOpen);
  $("toggle_settings").setAttribute("aria-expanded", String(isOpen));
  if (isOpen && isNarrow.matches) $("close_settings").focus();
}

// ---- key, models, theme, code --------------------------------------------------------------------------------------

/** What `askForKey` returned while the dialog is open; null while it is not. */
let asking = null;

/** Asks for the API key. Returns whether one was given. Who asks while the dialog is open gets the same answer. */
function askForKey(why) {
  $("key_reason").textContent = why;
  asking ??= new Promise((resolve) => {
    const dialog = $("key_dialog");
    $("key").value = key();
    dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener("close", async () => {
      asking = null;
      const choice = dialog.returnValue;
      if (choice) setKey(choice === "forget" ? "" : $("key").value.trim());
      $("key").value = "";
      const isGiven = choice === "save" && key() !== "";
      if (choice) await loadModels(); // a question that waits for the key needs a model
      resolve(isGiven);
    }, { once: true });
  });
  return asking;
}

async function loadModels() {
  const chosen = $("model").value;
  try {
    const found = await models();
    $("model").replaceChildren(...found.map(({ id }) => make("option", { value: id }, id)));
    if (found.some(({ id }) => id === chosen)) $("model").value = chosen;
    $("trouble").hidden = true;
  } catch (error) {
    if (error.status === 401) return void askForKey("This server asks for an API key.");
    $("trouble").textContent = error.message;
    $("trouble").hidden = false;
  }
}

function toggleTheme() {
  const style = getComputedStyle(document.documentElement);
  const theme = style.getPropertyValue("--is-dark").trim() === "1" ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("manta-theme", theme);
  announce(`${theme} theme`);
}

function showCode() {
  if (!settingsAreRight()) return;
  const next = $("prompt").value.trim();
  const said = messages();
  const added = next || !said.length ? [{ role: "user", content: next || "What is Manta?" }] : [];
  const body = requestBody([...(added.length ? said : said.slice(0, lastQuestion() + 1)), ...added]);
  $("curl").textContent = asCurl(body);
  $("python").textContent = asPython(body);
  $("code_dialog").showModal();
}

/** Returns the place of the last message that was answered. */
function lastQuestion() {
  return turns.findLastIndex((turn) => !(turn instanceof Answer));
}

/** Makes a text area as high as its text, up to its `max-height`. */
function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}

// ---- what the controls do ------------------------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  say($("prompt").value.trim());
});
$("prompt").addEventListener("input", () => fit($("prompt")));
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (stopping) stopping.abort();
  else if (document.body.classList.contains("with-settings") && isNarrow.matches) {
    openSettings(false);
    $("toggle_settings").focus();
  }
});
$("stop_answer").addEventListener("click", () => {
  stopping?.abort();
  $("prompt").focus();
});
$("new_chat").addEventListener("click", reset);
$("toggle_theme").addEventListener("click", toggleTheme);
$("toggle_settings").addEventListener("click", () => openSettings(!document.body.classList.contains("with-settings")));
$("close_settings").addEventListener("click", () => {
  openSettings(false);
  $("toggle_settings").focus();
});
$("open_key").addEventListener("click", () => askForKey("Requests of this tab carry this key."));
$("open_code").addEventListener("click", showCode);
$("settings").addEventListener("input", showSettings);
$("schema_example").addEventListener("click", () => set({ schema: JSON.stringify(ORDER, null, 2) }));
$("tools_example").addEventListener("click", () => set({ tools: JSON.stringify(WEATHER, null, 2) }));
for (const name of ["curl", "python"]) $(`${name}_head`).append(copyButton(() => $(name).textContent));
for (const { title, prompt, settings } of EXAMPLES) {
  const button = make("button", { type: "button" }, make("strong", {}, title), make("span", {}, prompt));
  button.addEventListener("click", () => {
    set({ ...NONE, ...settings });
    say(prompt);
  });
  $("examples").append(make("li", {}, button));
}

openSettings(!isNarrow.matches);
showSettings();
loadModels();
if (!isNarrow.matches) $("prompt").focus();
