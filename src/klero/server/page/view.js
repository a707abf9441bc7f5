// How tokens look, and what is told of one. Texts of the model enter the page as text alone.

const LEAST = Math.log(1000); // shading is full at a probability of 0.1 %
const RULED_OUT = -9999; // how the routes write minus infinity
const MARKS = new Map([["\n", "↵"], ["\t", "⇥"]]);
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff]/;

/** A new element. classes: its class; parts: what it holds, strings as text. */
export function make(tag, classes, ...parts) {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  element.append(...parts);
  return element;
}

/** A probability in per cent. */
export function percent(probability) {
  const value = 100 * probability;
  if (value === 0 || value === 100) return `${value} %`;
  if (value >= 99.95) return "> 99.9 %";
  if (value >= 9.95) return `${value.toFixed(1)} %`;
  return `${sized(value, value >= 0.001 ? 2 : 1)} %`;
}

/** A number with so many digits that count. */
const sized = (value, digits) => value.toPrecision(digits).replaceAll("-", "−");

const likely = (logprob) => logprob <= RULED_OUT ? 0 : Math.min(1, Math.exp(logprob));

function shown(logprob) {
  if (logprob <= RULED_OUT) return "−∞";
  return Math.abs(logprob) >= 0.01 ? logprob.toFixed(3).replace("-", "−") : logprob ? sized(logprob, 2) : "0";
}

/** How much a token is shaded, from 0 to 1. */
function shade(logprob) {
  return logprob === null ? 0 : Math.max(0, Math.min(1, -logprob / LEAST));
}

function mark(character) {
  const code = character.codePointAt(0);
  return MARKS.get(character) ?? (code < 32 ? String.fromCodePoint(0x2400 + code) : code === 127 ? "␡" : "·");
}

/** A text whose invisible characters have marks before them; the marks are no text, and are not copied. */
function marked(text, alsoSpaces = false) {
  const parts = document.createDocumentFragment();
  for (const character of text) {
    const sign = alsoSpaces && character === " " ? "␣" : UNSEEN.test(character) ? mark(character) : null;
    if (sign !== null) {
      const before = make("span", "mark");
      before.dataset.mark = sign;
      parts.append(before);
      if (alsoSpaces) continue;
    }
    if (parts.lastChild?.nodeType === Node.TEXT_NODE) parts.lastChild.data += character;
    else parts.append(character);
  }
  return parts;
}

/** Make or renew the element of a token. */
export function draw(token, element = make("span")) {
  element.className = "token";
  element.role = "option";
  element.tabIndex = element.tabIndex === 0 ? 0 : -1;
  element.style.setProperty("--shade", shade(token.logprob).toFixed(3));
  element.classList.toggle("hidden", token.isHidden);
  element.classList.toggle("piece", token.isPiece || (!token.isHidden && token.text === ""));
  element.ariaLabel = `${token.text || token.name}, ${percent(likely(token.logprob ?? 0))}`;
  const kept = token.cutAt === null ? token.text : token.text.slice(0, token.cutAt);
  const [lead] = /^ *(?=[^ ])|/.exec(kept); // left unshaded: a line may break behind it
  element.replaceChildren(lead, make("span", "ink", marked(kept.slice(lead.length))));
  if (token.isHidden) element.dataset.name = token.name;
  if (token.cutAt !== null) element.append(make("s", "", marked(token.text.slice(token.cutAt))));
  return element;
}

function alternatives(token, isProcessed) {
  const table = make("table", "", make("caption", "", isProcessed ? "Could have come, as drawn" : "Could have come"));
  for (const { name, logprob } of token.top) {
    const isOwn = name === token.name && logprob === token.logprob;
    const bar = make("span", "bar");
    bar.style.setProperty("--share", likely(logprob).toFixed(4));
    const row = make(
      "tr", isOwn ? "own" : "", make("th", "", marked(name, true)), make("td", "", bar),
      make("td", "number", logprob <= RULED_OUT ? "ruled out" : percent(likely(logprob))),
    );
    row.firstChild.scope = "row";
    if (isOwn) row.ariaCurrent = "true";
    table.append(row);
  }
  return table;
}

function receipt(said) {
  const list = make("dl", "receipt");
  const add = (name, ...parts) => list.append(make("dt", "", name), make("dd", "", ...parts));
  const both = (logprob) => [percent(likely(logprob)), make("span", "quiet", ` ${shown(logprob)}`)];
  if (said.rank !== undefined) add("rank", `${said.rank}`);
  if (said.num_kept !== undefined) add("num_kept", `${said.num_kept}`);
  if (said.kept_mass !== undefined) add("kept_mass", ...both(said.kept_mass));
  if (said.raw !== undefined) add("raw", ...both(said.raw));
  if (said.processed !== undefined) add("processed", ...both(said.processed));
  return list;
}

/** What is told of the token at a place: what it is, what else could have come, and what it was drawn from. */
export function tell(token, place, isProcessed) {
  const what = token.isHidden ? "not part of the text" : token.isPiece || !token.text ? "part of a character" : "";
  const id = token.receipt?.token_id === undefined ? "" : ` · id ${token.receipt.token_id}`;
  const parts = [
    make("p", "quiet", `token ${place + 1}${id}${what && ` · ${what}`}`),
    make("p", "name", marked(token.name, true)),
    make("p", "share", token.logprob === null ? "" : percent(likely(token.logprob))),
  ];
  if (token.top.length) parts.push(alternatives(token, isProcessed));
  if (token.receipt) parts.push(receipt(token.receipt));
  return parts;
}
