// A request as a command for a shell.

import { make } from "./view.js";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`; // one word of a POSIX shell

/** The command that sends a request. body: its JSON, sent as it is; hasKey: it brings the key in KLERO_API_KEY. */
export function commandOf(url, body, hasKey) {
  const parts = [`curl -N ${quoted(url)}`, "-H 'Content-Type: application/json'"];
  if (hasKey) parts.push('-H "Authorization: Bearer $KLERO_API_KEY"');
  parts.push(`--data-raw ${quoted(body)}`);
  return parts.join(" \\\n  ");
}

/** Put a text on the clipboard. Returns whether it is there. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // without TLS browsers have no such clipboard, but copy what is selected
    const focused = document.activeElement;
    const field = make("textarea", "unseen");
    field.value = text;
    document.body.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return isCopied;
  }
}
