// The header and the form of the key: whether there is a model to ask, and with which key.

import { ServerError, model } from "./api.js";
import { make } from "./view.js";

const LOOK = 1500; // milliseconds between two looks at a server that is not ready
const KEY = "klero.key";
const header = document.getElementById("model");
const form = document.getElementById("key-form");
const field = document.getElementById("key");
const said = document.getElementById("key-said");
let key = sessionStorage.getItem(KEY) ?? "";
let after = null; // what is done once the key is accepted
let number = 0; // of looks: the last one alone tells
let timer = null;

/** The key that requests bring; "": none. */
export const keyNow = () => key;

/** Ask for the model until there is one, and say how that stands. */
export async function look() {
  clearTimeout(timer);
  number += 1;
  const own = number;
  let card = null;
  let fault = null;
  try {
    card = await model(key);
  } catch (error) {
    fault = error;
  }
  if (own !== number) return;
  if (card) accept(card);
  else if (fault.status === 401) askForKey();
  else {
    const isTold = fault instanceof ServerError && fault.status > 0;
    tell(isTold ? "" : "gone", isTold ? fault.message : "The server cannot be reached; looking again");
    timer = setTimeout(look, LOOK);
  }
}

/** Say in the header how it stands; the same again is not said again. */
function tell(state, ...parts) {
  const text = make("p", "", ...parts);
  header.className = state;
  if (text.textContent !== header.textContent) header.replaceChildren(...text.childNodes);
}

function accept(card) {
  tell("ready", make("b", "", card.id), ` · ${card.max_model_len} tokens of context`);
  if (key) sessionStorage.setItem(KEY, key);
  if (form.hidden) return;
  form.hidden = true;
  field.value = "";
  const then = after;
  after = null;
  then?.();
}

/** Ask for a key, or for another one. then: what is done once it is accepted. */
export function askForKey(then = after) {
  after = then;
  sessionStorage.removeItem(KEY);
  tell("", "Waiting for a key");
  said.textContent = key ? "This key was not accepted." : "This server asks for a key.";
  if (key) field.setAttribute("aria-invalid", "true");
  form.hidden = false;
  field.focus();
  field.select();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  key = field.value.trim();
  field.removeAttribute("aria-invalid");
  said.textContent = "Asking the server";
  look();
});
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible" && form.hidden) look();
});
