// The tokens of an answer, as the two routes tell of them, in one shape.
//
// A token: name (how the route spells it), bytes (none: it is not shown), logprob, top ([{name, logprob}], likeliest
// first), receipt, offset (where its text begins, in characters; null in a chat); and how it is shown: text, isPiece
// (a character begins in it that it does not end), isHidden (no part of the text), cutAt (where in `text` a stop string
// cut the answer off, null: nowhere).

const BROKEN = "\uFFFD";
const BYTES = "bytes:";
const encoder = new TextEncoder();

/** What a route says of the tokens of a choice, or of the part of one that an event brings. */
export function tokensOf(choice) {
  const said = choice.logprobs;
  if (!said) return [];
  const found = said.content ? said.content.map(ofChat) : said.tokens.map((_, i) => ofCompletion(said, i));
  return found.map((token, i) => ({
    ...token, receipt: choice.receipts?.[i] ?? null, text: "", isPiece: false, isHidden: false, cutAt: null,
  }));
}

function ofChat(entry) {
  const top = entry.top_logprobs.map(({ token, logprob }) => ({ name: token, logprob }));
  const own = { name: entry.token, logprob: entry.logprob };
  if (!top.some((one) => one.name === own.name && one.logprob === own.logprob)) top.push(own);
  return { ...own, top, bytes: Uint8Array.from(entry.bytes), offset: null };
}

function ofCompletion(said, i) {
  const spelled = (name) => bytesOf(name) ? name.slice(BYTES.length) : name;
  const name = spelled(said.tokens[i]);
  const top = Object.entries(said.top_logprobs[i] ?? {}).map(([one, logprob]) => ({ name: spelled(one), logprob }));
  top.sort((a, b) => b.logprob - a.logprob || (b.name === name) - (a.name === name));
  const bytes = bytesOf(said.tokens[i]) ?? encoder.encode(name);
  return { name, logprob: said.token_logprobs[i], top, bytes, offset: said.text_offset[i] };
}

/** The bytes of a part of a character, which /v1/completions spells bytes:\xe2\x82. null: it is none. */
function bytesOf(name) {
  const hex = /^bytes:((?:\\x[0-9a-f]{2})+)$/.exec(name);
  return hex && Uint8Array.from(hex[1].split("\\x").slice(1), (two) => parseInt(two, 16));
}

function decode(bytes, stream = false) {
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes, { stream });
}

/** How many of the last bytes begin a character that may still end. */
function openAt(bytes) {
  return [3, 2, 1].find((k) => k <= bytes.length && decode(bytes.subarray(-k), true) === "") ?? 0;
}

/** One choice as it comes. text: the server's; tokens: what it is made of. */
export class Answer {
  constructor() {
    this.tokens = [];
    this.text = "";
    this.seed = null;
    this.isReproducible = null;
    this.finishReason = null;
    this.stopReason = null;
    this._open = new Uint8Array();
  }

  /** Take in what an event says of the choice. Returns the tokens that are new or that look different now. */
  add(choice) {
    this.text += choice.text ?? choice.delta?.content ?? "";
    if (choice.seed !== undefined) {
      this.seed = String(choice.seed);
      this.isReproducible = choice.reproducible;
    }
    const changed = new Set();
    for (const token of tokensOf(choice)) {
      const last = this.tokens.at(-1);
      // On /v1/completions a special token is known by the next one, which begins where it began.
      if (last?.text && token.offset !== null && token.offset === last.offset) this._hide(last, changed);
      this.tokens.push(token);
      if (token.bytes.length) this._read(token, changed);
      else this._hide(token, changed);
    }
    if (choice.finish_reason) this._end(choice, changed);
    return changed;
  }

  /** Give a token the characters that it ends. One that it breaks is shown with the token before, as U+FFFD. */
  _read(token, changed) {
    const bytes = Uint8Array.from([...this._open, ...token.bytes]);
    const open = openAt(bytes);
    let text = decode(bytes.subarray(0, bytes.length - open));
    const isReal = bytes[0] === 0xef && bytes[1] === 0xbf && bytes[2] === 0xbd; // U+FFFD itself, in pieces
    if (this._open.length && text.startsWith(BROKEN) && !isReal) {
      text = text.slice(1);
      this._break(this.tokens.at(-2), changed);
    }
    this._open = bytes.subarray(bytes.length - open);
    token.text = text;
    token.isPiece = open > 0;
    changed.add(token);
  }

  _break(token, changed) {
    token.text += BROKEN;
    token.isPiece = false;
    this._open = new Uint8Array();
    changed.add(token);
  }

  _hide(token, changed) {
    if (this._open.length && token === this.tokens.at(-1)) this._break(this.tokens.at(-2), changed);
    token.text = "";
    token.isHidden = true;
    changed.add(token);
  }

  _end(choice, changed) {
    this.finishReason = choice.finish_reason;
    this.stopReason = choice.stop_reason ?? null;
    if (this._open.length) this._break(this.tokens.at(-1), changed);
    const shown = this.tokens.map((token) => token.text).join("");
    if (shown === this.text) return;
    if (typeof choice.stop_reason === "string" && shown.startsWith(this.text)) {
      let start = 0;
      for (const token of this.tokens) {
        if (start + token.text.length > this.text.length) {
          token.cutAt = Math.max(0, this.text.length - start);
          changed.add(token);
        }
        start += token.text.length;
      }
      return;
    }
    const last = this.tokens.at(-1);
    if (last && shown === this.text + last.text) this._hide(last, changed); // a special token, such as the end
  }
}
