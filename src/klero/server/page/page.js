// The page: asks, shows what comes while it comes, and asks again.

import { ServerError, events } from "./api.js";
import { addMessage, blame, bodyOf, request, showMode, withSeed } from "./ask.js";
import { commandOf, copy } from "./curl.js";
import { askForKey, keyNow, look } from "./model.js";
import { Answer } from "./tokens.js";
import { draw, make, tell } from "./view.js";
import { walk } from "./walk.js";

const TOLD = 2000; // milliseconds that a button says what it did
const $ = (id) => document.getElementById(id);
const tokens = $("tokens");
const elements = new Map(); // token -> its element
let running = null; // what ends the answer that comes
let last = null; // the request and the answer that are shown, up to the first event of another

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
  $("again").disabled ||= last === null;
  $("reply").hidden = controller !== null || !isChat(last) || !last.answer.finishReason || last.isReplied;
  tokens.ariaBusy = String(controller !== null);
  $("answer").classList.toggle("waiting", controller !== null);
  if (haltFocused) $(last ? "again" : "run").focus();
}

const isChat = (asked) => asked?.request.path.includes("chat") ?? false;

/**
 * Send a request and show its answer; until that comes, the one before stays. before: the text that it must repeat,
 * where it is the same request again.
 */
async function run(asked, before = null) {
  const controller = new AbortController();
  const key = keyNow();
  const next = { request: asked, answer: new Answer(), begin: performance.now(), first: null, usage: null, key };
  tellError(null);
  setRunning(controller);
  $("status").textContent = "The answer comes.";
  let end = "";
  try {
    for await (const found of events(asked.path, bodyOf(asked), key, controller.signal)) {
      if (found.length && last !== next) replace(next);
      take(found);
    }
    end = ended(next, before);
  } catch (error) {
    if (error.name === "AbortError") {
      end = "stopped by you";
    } else if (error instanceof ServerError) {
      end = "broken off";
      if (error.status === 401) askForKey(() => running ?? run(asked, before));
      else tellError(error);
      if (error.status < 400 || error.status >= 500) look();
    } else {
      throw error;
    }
  } finally {
    setRunning(null);
    $("status").textContent = "";
    if (last === next) showFacts(end);
  }
}

function ended(asked, before) {
  const { request: { fields }, answer } = asked;
  if (before !== null) return answer.text === before ? "the same text again" : "another text than before";
  if (answer.finishReason === "length") {
    return isChat(asked) && !fields.max_tokens ? "the context is full" : "cut at max_tokens"; // a prompt has a default
  }
  const at = typeof answer.stopReason === "string" ? ` at ${JSON.stringify(answer.stopReason)}` : "";
  return answer.finishReason + at;
}

/** The answer that comes takes the place of the one before. */
function replace(next) {
  last = next;
  $("answer").classList.remove("waiting");
  elements.clear();
  walked.clear();
  tokens.replaceChildren();
  $("empty").hidden = true;
  $("details").hidden = true;
  $("facts").hidden = $("sent").hidden = true;
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
  if (found.length && $("facts").hidden) showFacts("");
}

function showFacts(end) {
  const { answer, first, begin, usage } = last;
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
const same = () => withSeed(last.request, last.answer.seed);

function sentText() {
  const again = same();
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

async function copyCommand() {
  const again = same();
  const url = new URL(again.path, document.baseURI).href;
  const isCopied = await copy(commandOf(url, bodyOf(again), last.key !== ""));
  $("curl").textContent = $("status").textContent = isCopied ? "Copied" : "The browser did not copy it";
  setTimeout(() => { $("curl").textContent = "Copy as curl"; }, TOLD);
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running === null) run(request());
});
$("ask").addEventListener("change", showMode);
$("halt").addEventListener("click", () => running?.abort());
$("again").addEventListener("click", () => run(same(), last.answer.text));
$("curl").addEventListener("click", copyCommand);
$("add").addEventListener("click", () => addMessage("user").focus());
$("reply").addEventListener("click", () => {
  addMessage("assistant", last.answer.text);
  addMessage("user").focus();
  last.isReplied = $("reply").hidden = true;
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
