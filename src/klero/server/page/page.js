// The page: asks, shows what comes while it comes, and asks again.

import { ServerError, events, model } from "./api.js";
import { addMessage, blame, bodyOf, mode, request, withSeed } from "./ask.js";
import { Answer } from "./tokens.js";
import { draw, make, tell } from "./view.js";
import { walk } from "./walk.js";

const LOOK = 1500; // milliseconds between two looks at a server that is not ready
const KEY = "klero.key";
const $ = (id) => document.getElementById(id);
const tokens = $("tokens");
const elements = new Map(); // token -> its element
let key = sessionStorage.getItem(KEY);
let running = null; // what ends the answer that comes
let last = null; // the request and the answer that are shown
let after = null; // what is done once there is a key

const walked = walk(tokens, (element) => {
  const place = [...tokens.children].indexOf(element);
  const isProcessed = last.request.fields.logprobs_mode === '"processed"';
  $("details").replaceChildren(close(), ...tell(last.answer.tokens[place], place, isProcessed));
  $("details").hidden = false;
});

/** On narrow screens what is told of a token lies over the page. */
function close() {
  const button = make("button", "plain close", "×");
  button.ariaLabel = "Close";
  button.addEventListener("click", () => { $("details").hidden = true; });
  return button;
}

/** Ask for the model until there is one. */
async function look() {
  try {
    const card = await model(key);
    $("model").replaceChildren(make("b", "", card.id), ` · ${card.max_model_len} tokens of context`);
    $("model").className = "ready";
  } catch (error) {
    $("model").className = "";
    $("model").textContent = error.message;
    if (error.status === 401) askForKey(look, error);
    else setTimeout(look, LOOK);
  }
}

function askForKey(then, error) {
  after = then;
  $("model").textContent = error.message;
  $("key-form").hidden = false;
  $("key").focus();
}

function tellError(error) {
  $("error").hidden = error === null;
  $("error").textContent = error?.message ?? "";
  blame(error);
}

function setRunning(controller) {
  const haltFocused = document.activeElement === $("halt");
  running = controller;
  $("run").disabled = $("again").disabled = controller !== null;
  $("halt").disabled = controller === null;
  $("again").disabled ||= last?.answer.seed === null;
  $("reply").hidden = controller !== null || !last.request.path.includes("chat") || !last.answer.finishReason;
  tokens.ariaBusy = String(controller !== null);
  if (haltFocused) $("again").focus();
}

/** Send a request and show its answer. before: the text that it must repeat, where it is the same request again. */
async function run(asked, before = null) {
  const controller = new AbortController();
  last = { request: asked, answer: new Answer(), begin: performance.now(), first: null, usage: null };
  clear();
  setRunning(controller);
  let end = "";
  try {
    for await (const found of events(asked.path, bodyOf(asked), key, controller.signal)) take(found);
    end = ended(last.answer, before);
  } catch (error) {
    if (error.name === "AbortError") {
      end = "stopped by you";
    } else if (error instanceof ServerError) {
      end = last.answer.tokens.length ? "broken off" : "";
      if (error.status === 401) askForKey(() => run(asked, before), error);
      else tellError(error);
    } else {
      throw error;
    }
  } finally {
    setRunning(null);
    showFacts(end);
  }
}

function ended(answer, before) {
  if (before !== null) return answer.text === before ? "the same text again" : "another text than before";
  const at = typeof answer.stopReason === "string" ? ` at ${JSON.stringify(answer.stopReason)}` : "";
  return answer.finishReason + at;
}

function clear() {
  tellError(null);
  elements.clear();
  walked.clear();
  tokens.replaceChildren();
  $("empty").hidden = true;
  $("details").hidden = true;
  $("facts").hidden = $("sent").hidden = true;
  $("status").textContent = "The answer comes.";
}

/** Show what some events say. */
function take(found) {
  const changed = new Set();
  for (const { choices, usage } of found) {
    for (const choice of choices) for (const token of last.answer.add(choice)) changed.add(token);
    last.usage = usage ?? last.usage;
  }
  if (changed.size) last.first ??= performance.now();
  for (const token of changed) {
    const known = elements.get(token);
    const element = draw(token, known);
    if (known) continue;
    elements.set(token, element);
    if (!tokens.firstChild) element.tabIndex = 0;
    tokens.append(element);
  }
  if (last.answer.seed !== null && $("facts").hidden) showFacts("");
}

function showFacts(end) {
  const { answer, first, begin, usage } = last;
  if (answer.seed === null) {
    $("empty").hidden = false;
    $("status").textContent = "";
    return;
  }
  const list = $("facts");
  list.replaceChildren();
  const add = (name, ...parts) => list.append(make("div", "", make("dt", "", name), make("dd", "", ...parts)));
  add("seed", answer.seed, keep(answer.seed));
  add("reproducible", answer.isReproducible ? "yes" : "not promised");
  if (end) {
    const seconds = (performance.now() - first) / 1000;
    const count = answer.tokens.length;
    if (usage) add("prompt", `${usage.prompt_tokens} tokens`);
    add("answer", `${count} tokens`);
    const rate = Math.round((count - 1) / seconds);
    if (count > 1) add("speed", `${rate} tokens/s, first after ${duration(first - begin)}`);
    add("end", end);
    $("status").textContent = `${count} tokens, ${end}: ${answer.text}`;
    $("sent").querySelector("pre").textContent = sentText();
    $("sent").hidden = false;
  }
  list.hidden = false;
}

const duration = (ms) => ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;

/** The request that gives this answer again. */
function sentText() {
  const again = withSeed(last.request, last.answer.seed);
  const lines = Object.entries(again.fields).map(([name, json]) => `  ${JSON.stringify(name)}: ${json}`);
  return `POST /${again.path}\n{\n${lines.join(",\n")}\n}`;
}

function keep(seed) {
  const button = make("button", "plain", "keep");
  button.type = "button";
  button.ariaLabel = "Keep this seed for the next run";
  button.addEventListener("click", () => { $("ask").elements.seed.value = seed; });
  return button;
}

function showMode() {
  $("of-completion").hidden = mode() !== "completion";
  $("of-chat").hidden = mode() !== "chat";
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running === null) run(request());
});
$("ask").addEventListener("change", showMode);
$("halt").addEventListener("click", () => running?.abort());
$("again").addEventListener("click", () => run(withSeed(last.request, last.answer.seed), last.answer.text));
$("add").addEventListener("click", () => addMessage("user").focus());
$("reply").addEventListener("click", () => {
  addMessage("assistant", last.answer.text);
  addMessage("user").focus();
  $("reply").hidden = true;
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem(KEY, key);
  $("key").value = "";
  $("key-form").hidden = true;
  after?.();
  if (after !== look) look();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    $("ask").requestSubmit();
  } else if (event.key === "Escape") {
    if (running) running.abort();
    else $("details").hidden = true;
  }
});

addMessage("user", "Name a colour.");
showMode();
look();
