// The form: what it asks, as a request, and which of its fields a refusal names.

import { typed, written } from "./api.js";
import { make } from "./view.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const PATHS = { completion: "v1/completions", chat: "v1/chat/completions" };
const ROLES = ["system", "user", "assistant"];
const MOST = { completion: "64", chat: "256" }; // max_tokens until somebody says another
const ESCAPES = { n: "\n", t: "\t", r: "\r", "\\": "\\" };
const form = document.getElementById("ask");
const messages = document.getElementById("messages");

/** "completion" or "chat". */
export const mode = () => form.elements.mode.value;

/** Show the fields of the mode. */
export function showMode() {
  document.getElementById("of-completion").hidden = mode() !== "completion";
  document.getElementById("of-chat").hidden = mode() !== "chat";
  form.elements.max_tokens.defaultValue = MOST[mode()]; // what was typed stays
}

/** The request that the form makes: its path, and the fields of its body, each as JSON. */
export function request() {
  const fields = {};
  const put = (name, value) => { fields[name] = JSON.stringify(value); };
  const top = form.elements.alternatives.value.trim() || "0";
  if (mode() === "completion") {
    put("prompt", form.elements.prompt.value);
    fields.logprobs = typed(top);
  } else {
    put("messages", rows().map((row) => ({ role: row.role.value, content: row.content.value })));
    put("logprobs", true);
    fields.top_logprobs = typed(top);
  }
  for (const name of NUMBERS) {
    const text = form.elements[name].value.trim();
    if (text) fields[name] = typed(text);
  }
  const stop = form.elements.stop.value.split("\n").filter(Boolean);
  if (stop.length) put("stop", stop.map((one) => one.replace(/\\([ntr\\])/g, (_, letter) => ESCAPES[letter])));
  put("logprobs_mode", form.elements.logprobs_mode.value);
  put("return_receipts", true);
  put("stream", true);
  put("stream_options", { include_usage: true });
  return { path: PATHS[mode()], fields };
}

/** The same request with this seed. */
export const withSeed = ({ path, fields }, seed) => ({ path, fields: { ...fields, seed } });

/** The body of a request. */
export const bodyOf = ({ fields }) => written(fields);

function rows() {
  return [...messages.children].map((row) => ({
    row, role: row.querySelector("select"), content: row.querySelector("textarea"),
  }));
}

/** Add a message to the conversation, and return its text field. */
export function addMessage(role, content = "") {
  const select = make("select", "", ...ROLES.map((one) => new Option(one, one, one === role, one === role)));
  const text = make("textarea", "text");
  const remove = make("button", "plain", "×");
  remove.type = "button";
  text.rows = 1;
  text.value = content;
  const row = make("div", "message", select, text, remove);
  remove.addEventListener("click", () => {
    const near = row.nextElementSibling ?? row.previousElementSibling;
    row.remove();
    label();
    near?.querySelector("textarea").focus();
  });
  messages.append(row);
  label();
  return text;
}

function label() {
  for (const [i, { row, role, content }] of rows().entries()) {
    role.ariaLabel = `Role of message ${i + 1}`;
    content.ariaLabel = `Message ${i + 1}`;
    const remove = row.querySelector("button");
    remove.ariaLabel = `Remove message ${i + 1}`;
    remove.disabled = messages.children.length === 1;
  }
}

/** Mark the fields that a refusal names, and only those. error: a ServerError, or null. */
export function blame(error) {
  for (const field of form.querySelectorAll("[aria-invalid]")) {
    field.removeAttribute("aria-invalid");
    field.removeAttribute("aria-errormessage");
  }
  if (!error) return;
  const named = [...error.message.matchAll(/(?:^|; )(\w+)[^\s=:]*(?:=|: )/g)].map((match) => match[1]);
  if (error.param) named.push(error.param);
  for (const name of named) {
    const field = fieldOf(name);
    if (!field) continue;
    field.setAttribute("aria-invalid", "true");
    field.setAttribute("aria-errormessage", "error");
  }
}

function fieldOf(path) {
  const [, name, place] = /^(\w+)(?:\[(\d+)\])?/.exec(path) ?? [];
  if (name === "messages") return rows()[Number(place ?? -1)]?.content ?? rows().at(-1)?.content;
  const field = form.elements.namedItem({ logprobs: "alternatives", top_logprobs: "alternatives" }[name] ?? name ?? "");
  return field instanceof Element ? field : null; // what was typed may look like a name
}
