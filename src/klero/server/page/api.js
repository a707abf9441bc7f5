// Requests and streams of the public routes. A seed has up to 20 digits, and JavaScript's numbers keep 15: seeds are
// read and written as the digits that they are.

const NUMBER = /^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/;
const STRING_OR_NUMBER = /"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g;
const INTEGER = /^-?\d+$/;
const PATIENCE = 10_000; // milliseconds that a look at the model may take

/** What a server refuses or breaks off. status: of HTTP, 200 in the middle of a stream, 0 without an answer. */
export class ServerError extends Error {
  constructor(status, error) {
    super(error.message);
    this.status = status;
    this.param = error.param ?? null;
  }
}

/** The value of a JSON text; an integer that a number cannot hold is the string of its digits. */
export function parse(text) {
  if (!/\d{16}/.test(text)) return JSON.parse(text);
  const quoted = (part) => INTEGER.test(part) && !Number.isSafeInteger(Number(part)) ? `"${part}"` : part;
  return JSON.parse(text.replace(STRING_OR_NUMBER, quoted));
}

/** The JSON of what somebody typed: a number digit by digit, anything else a string, for the server to judge. */
export function typed(text) {
  const number = text.replace(/^(-?)\./, "$10.");
  return NUMBER.test(number) ? number : JSON.stringify(text);
}

/** The JSON of an object. fields: its values, each as JSON already. */
export function written(fields) {
  return `{${Object.entries(fields).map(([name, json]) => `${JSON.stringify(name)}:${json}`).join(",")}}`;
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function ask(path, key, options) {
  if (/[^!-~]/.test(key)) throw new ServerError(401, { message: "No header can bring this key." });
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(key), cache: "no-store", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, { message: "The server could not be reached." });
  }
  if (response.ok) return response;
  const text = await response.text();
  let error = null;
  try {
    error = parse(text).error;
  } catch { /* somebody between us and the server answered */ }
  throw new ServerError(response.status, error ?? { message: `The answer was HTTP ${response.status}.` });
}

/** The first model that is served. */
export async function model(key) {
  const response = await ask("v1/models", key, { signal: AbortSignal.timeout(PATIENCE) });
  return parse(await response.text()).data[0];
}

/**
 * Yield the events of a stream, those that came at once as a list, up to [DONE].
 * ServerError where it is refused, ends in an error, or ends without [DONE]; AbortError once `signal` says so.
 */
export async function* events(path, body, key, signal) {
  const response = await ask(path, key, { method: "POST", body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await readFrom(reader);
    if (done) break;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    const found = [];
    for (const block of blocks.filter((one) => one.startsWith("data: "))) { // others are comments
      const data = block.slice("data: ".length);
      const event = data === "[DONE]" ? null : parse(data);
      if (event === null || event.error) {
        yield found;
        if (event === null) return;
        throw new ServerError(200, event.error);
      }
      found.push(event);
    }
    yield found;
  }
  throw new ServerError(200, { message: "The connection broke before the answer was whole." });
}

async function readFrom(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return { done: true };
  }
}
