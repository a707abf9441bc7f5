// One token at a time is current: the one pointed at, focused, or reached with the arrow keys. Tab enters at it.

/** Let tokens in `list` be walked along. show: called with the element that is current now. */
export function walk(list, show) {
  let current = null;

  function take(element) {
    if (!element) return;
    if (current && current !== element) {
      current.ariaSelected = "false";
      current.tabIndex = -1;
    }
    current = element;
    current.ariaSelected = "true";
    current.tabIndex = 0;
    show(current);
  }

  list.addEventListener("pointerover", (event) => {
    const element = event.target.closest(".token");
    if (event.pointerType !== "touch" && element !== current) take(element);
  });
  list.addEventListener("click", (event) => take(event.target.closest(".token"))); // a tap need not focus
  list.addEventListener("focusin", (event) => take(event.target.closest(".token")));
  list.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !current) return;
    const next = {
      ArrowRight: () => current.nextElementSibling, ArrowLeft: () => current.previousElementSibling,
      ArrowDown: () => beside(current, 1), ArrowUp: () => beside(current, -1),
      Home: () => list.firstElementChild, End: () => list.lastElementChild,
    }[event.key];
    if (!next) return;
    event.preventDefault();
    next()?.focus();
  });

  /** Forget the tokens. */
  return { clear: () => { current = null; } };
}

/** The token in the line below (1) or above (-1) that is nearest to this one; null in the last line or the first. */
function beside(element, way) {
  const middle = (box) => (box.left + box.right) / 2;
  const boxOf = (token) => token.querySelector(".ink").getClientRects()[0]; // spaces before it may be a line above
  const from = boxOf(element);
  let best = null;
  let line = null;
  for (let one = element; one; one = way > 0 ? one.nextElementSibling : one.previousElementSibling) {
    const box = boxOf(one);
    if (!box || (box.top - from.top) * way < from.height / 2) continue;
    line ??= box.top;
    if (Math.abs(box.top - line) > from.height / 2) break;
    const distance = Math.abs(middle(box) - middle(from));
    if (best === null || distance < best.distance) best = { one, distance };
  }
  return best?.one ?? null;
}
