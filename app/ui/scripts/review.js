// Links values and evidence, and carries the review: corrections in place, stepping, approval. `area` is the whole desk.
const area = element.closest(".desk");
const all = (selector) => [...element.querySelectorAll(selector)];

const light = (number, isScrolled) => {
  for (const node of area.querySelectorAll(".lit")) node.classList.remove("lit");
  if (number === null) return;
  for (const node of area.querySelectorAll(String(number).split(" ").map((each) => `[data-field~="${each}"]`).join(","))) {
    node.classList.add("lit");
    const box = node.closest(".source pre");
    if (!box || !isScrolled) continue;
    const offset = node.getBoundingClientRect().top - box.getBoundingClientRect().top;
    if (offset < 0 || offset > box.clientHeight - 24) box.scrollTop += offset - box.clientHeight / 3;
  }
};
const follow = (event) => {
  const node = event.target.closest?.("[data-field]");
  if (node) light(node.dataset.field, node.tagName !== "MARK");
  else if (event.type === "mouseover") light(document.activeElement?.closest?.("[data-field]")?.dataset.field ?? null, false);
};

const isEdited = (input) => input.value !== input.defaultValue;
const reading = () => element.querySelector(".record[data-text]")?.dataset.reading ?? "";
const act = (action, pointer) => trigger("act", {
  action, pointer, of: reading(), seen: all(".seen .value").map((input) => input.dataset.pointer),
  edits: Object.fromEntries(all(".value").filter(isEdited).map((input) => [input.dataset.pointer, input.value])),
});
const goTo = (cell) => {
  const input = cell.querySelector(".value");
  input.focus();
  input.select();
  cell.scrollIntoView({ block: "nearest" });
};
const step = (isBack) => {
  const open = all(".flagged"), cells = all("[data-field]");
  const at = cells.indexOf(document.activeElement?.closest("[data-field]"));
  const ahead = open.filter((cell) => (isBack ? cells.indexOf(cell) < at : cells.indexOf(cell) > at));
  const next = isBack ? ahead.at(-1) ?? open.at(-1) : ahead[0] ?? open[0];
  if (!next || (next === cells[at] && open.length === 1)) { element.querySelector(".approve")?.focus(); return; }
  goTo(next);
};

// Every correction draws the record again: what had the focus gets it back, with what was typed meanwhile.
let held = null, last = null, looked = "", added = "";
const hold = ({ target }) => {
  if (!target.dataset?.key) return;
  held = { key: target.dataset.key };
  if (!target.matches(".value")) return;
  last = target;
  Object.assign(held, { text: isEdited(target) ? target.value : null, range: [target.selectionStart, target.selectionEnd] });
};
const restore = () => {
  const fresh = added && all(".flagged .value").find(({ dataset }) => `${dataset.pointer}/`.startsWith(added));
  if (fresh) { added = ""; goTo(fresh.closest("[data-field]")); return; }
  const node = held && all("[data-key]").find((each) => each.dataset.key === held.key);
  if (!node || (document.activeElement && document.activeElement !== document.body)) return;
  if (typeof held.text === "string") node.value = held.text;
  node.focus({ preventScroll: true });
  if (held.range) node.setSelectionRange(...held.range);
};
for (const kind of ["focusin", "input", "keyup"]) element.addEventListener(kind, hold);

element.addEventListener("focusin", ({ target }) => {
  if (!target.matches?.(".value")) return;
  globalThis.lookedAt = looked = target.dataset.pointer;
  target.closest("[data-field]").classList.add("seen");
  const [numToLook, numUnseen] = [".flagged", "[data-field]"].map((cells) => all(`${cells}:not(.seen)`).length);
  const button = element.querySelector(".approve"), word = button?.dataset.word;
  if (!numToLook && button && !word.includes(" when ")) button.textContent = numUnseen ? `${word}, ${numUnseen} not opened` : word;
  trigger("look");
});
element.addEventListener("change", ({ target }) => { if (target.matches?.(".value") && isEdited(target)) act("edit", target.dataset.pointer); });
const press = (event) => {
  const button = event.target.closest?.("[data-act]");
  if (!button) return;
  const unseen = button.dataset.act === "approve" && element.querySelector(".flagged:not(.seen)");
  if (unseen) { goTo(unseen); return; }
  if (button.dataset.act === "next") { step(false); return; }
  if (held) held.text = null;
  // The first value of a new item gets the focus when it is drawn.
  added = button.dataset.act === "add" ? button.dataset.pointer.replace(/\d+$/, (index) => `${Number(index) + 1}/`) : "";
  act(button.dataset.act, button.dataset.pointer);
};
element.addEventListener("click", press);
element.addEventListener("keydown", (event) => {
  const { target: input, key } = event;
  if (event.altKey && (key === "ArrowDown" || key === "ArrowUp")) {
    event.preventDefault();
    step(key === "ArrowUp");
  } else if (input.matches?.(".value") && key === "Enter" && !event.shiftKey && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    const { pointer } = input.dataset;
    act("check", pointer);
    input.closest("[data-field]").classList.remove("flagged");
    step(false);
  } else if (input.matches?.(".value") && key === "Escape" && isEdited(input)) {
    event.stopPropagation();
    input.value = input.defaultValue;
    hold(event);
  }
});

// A click into the marked text leads to the value, or beside the marks to the text itself; a selection does not.
let opening = 0;
const openText = (pre) => {
  const caret = getSelection(), range = document.createRange();
  range.setStart(pre, 0);
  if (pre.contains(caret.anchorNode)) range.setEnd(caret.anchorNode, caret.anchorOffset);
  const at = range.toString().length, box = area.querySelector("#source textarea");
  const text = [...area.querySelectorAll("#source-tabs [role=tab]")].find((each) => each.textContent.trim() === "Text");
  if (!text) return;
  text.click();
  setTimeout(() => { box.focus(); box.setSelectionRange(at, at); }, 100);
};
const begin = ({ target, detail }) => {
  clearTimeout(opening);
  const source = target.closest?.(".evidence pre, .evidence .empty"), mark = target.closest?.(".evidence mark");
  if (!source || detail !== 1) return;
  // A second click would select a word.
  opening = setTimeout(() => {
    if (!getSelection().isCollapsed) return;
    const number = mark?.dataset.field.split(" ")[0];
    const input = mark && element.querySelector(`[data-field="${number}"] .value`);
    if (input) { input.focus(); input.select(); } else openText(source);
  }, 250);
};
// The panel "Why this value?" stays at the lower edge and must not cover the value.
let explained = "";
const uncover = () => {
  const why = area.querySelector(".why"), cell = document.activeElement?.closest?.("[data-field]");
  if (!why || why.textContent === explained) return;
  explained = why.textContent;
  const over = cell && area.contains(cell) ? cell.getBoundingClientRect().bottom + 8 - why.getBoundingClientRect().top : 0;
  if (over > 0) scrollBy(0, over);
};
// The first stop of the Tab key leads to the record.
const skip = area?.id === "extract" && document.querySelector(".skip");
if (skip) {
  document.querySelector(".gradio-container main")?.prepend(skip);
  skip.onclick = () => {
    [...document.querySelectorAll("#tabs [role=tab]")].find((each) => each.textContent.trim() === "Extract")?.click();
    setTimeout(() => (all(".flagged .value")[0] ?? all(".value")[0] ?? document.querySelector("#run"))?.focus(), 100);
  };
}

// A record never stands beside another text or schema: until it is read again, it is set aside.
const digest = (text) => {
  let low = 1, high = 0;
  for (const byte of new TextEncoder().encode(text)) { low = (low + byte) % 65521; high = (high + low) % 65521; }
  return String(((high << 16) | low) >>> 0);
};
const compare = () => {
  if (!element.isConnected) return;
  const record = element.querySelector(".record[data-text]"), box = area.querySelector("#source textarea"), schema = area.querySelector("[data-schema-now]");
  const isStale = Boolean(record && ((box && digest(box.value) !== record.dataset.text) || (area.id === "extract" && schema?.dataset.schemaNow !== record.dataset.schema)));
  area.classList.toggle("stale", isStale);
  for (const node of area.querySelectorAll(".fields, .why-box")) node.inert = isStale;
  nameText(box);
};
// What was typed while the example was on its way takes its place again.
const giveBack = (box) => {
  if (globalThis.typedBefore && box.value !== globalThis.typedBefore) {
    box.value = globalThis.typedBefore;
    box.dispatchEvent(new Event("input", { bubbles: true }));
  }
  globalThis.typedBefore = null;
};
// A text that shares less than half its words with the file it began as is a person's own.
const nameText = (box) => {
  const span = area.querySelector("#source-name span"), words = span?.dataset.words.split(" ").filter(Boolean) ?? [];
  if (!span || !box) return; // Gradio draws the box later
  if (globalThis.typedBefore && span.dataset.name) setTimeout(giveBack, 100, box); // behind the update that brought the example
  const isOwn = (words.length || !span.dataset.name) && box.value.trim() && words.filter((word) => box.value.includes(word)).length * 2 <= words.length;
  const name = !box.value.trim() && words.length ? "No text yet" : isOwn ? "Your text" : !words.length || digest(box.value) === span.dataset.text ? span.dataset.name : `${span.dataset.name}, edited`;
  if (span.textContent !== name) span.textContent = span.title = name;
};
// A selection of the text becomes the value of the field used last, when the button is pressed.
const offer = () => {
  const text = String(getSelection()).trim(), source = getSelection().anchorNode?.parentElement?.closest?.(".source");
  let button = area.querySelector(".use");
  if (!text || !source || !area.contains(source) || !last?.isConnected) { if (button) button.hidden = true; return; }
  if (!button) {
    button = document.createElement("button");
    Object.assign(button, { type: "button", className: "use" });
    button.addEventListener("pointerdown", (event) => event.preventDefault());
    button.addEventListener("click", () => {
      last.value = button.text;
      last.dispatchEvent(new Event("change", { bubbles: true }));
      button.hidden = true;
    });
  }
  source.append(button);
  Object.assign(button, { text, hidden: false, textContent: `Use “${text.length > 30 ? `${text.slice(0, 30)}…` : text}” for ${last.getAttribute("aria-label")}` });
};
const mend = () => { last = all(".value").find((each) => each.dataset.pointer === last?.dataset.pointer) ?? null; };
if (area) {
  // Gradio may run this script again for the same desk: the last one counts.
  area.links?.abort();
  const { signal } = area.links = new AbortController();
  for (const kind of ["mouseover", "focusin"]) area.addEventListener(kind, follow, { signal });
  area.addEventListener("click", (event) => { if (event.target.closest?.(".why-box")) press(event); else begin(event); }, { signal });
  for (const kind of ["change", "focusin"]) area.addEventListener(kind, ({ target }) => { if (target.type === "file" || target.closest?.("#samples")) globalThis.typedBefore = null; }, { signal });
  area.addEventListener("input", ({ target }) => { if (target.closest?.("#source")) compare(); }, { signal });
  document.addEventListener("selectionchange", offer, { signal });
  new MutationObserver(() => { compare(); uncover(); }).observe(area, { childList: true, subtree: true });
}
// Gradio keeps an input, with what was typed, where the new record has one, too: that belongs to the old record.
let drawn = "";
const settle = () => {
  const record = element.querySelector(".record[data-text]");
  const now = record ? JSON.stringify(record.dataset) : "";
  if (now !== drawn) { held = last = null; looked = ""; }
  // Text that is being typed stays; another page may have changed a value that only has the focus.
  const isTyping = typeof held?.text === "string";
  for (const input of all(".value")) if (!isTyping || input !== document.activeElement) input.value = input.defaultValue;
  drawn = now;
};
// The panel that explains a value is drawn again after its correction.
const explainAgain = () => {
  if (!area?.querySelector(".why")) return;
  globalThis.lookedAt = looked;
  trigger("redrawn");
};
// What was typed and did not reach the server, as while it is down, is typed again into the same record after a reload.
const EDITS = "troupe-edits";
const madeOf = () => JSON.stringify({ ...element.querySelector(".record[data-text]")?.dataset });
const keepEdits = () => {
  const edits = Object.fromEntries(all(".value").filter(isEdited).map((input) => [input.dataset.pointer, input.value]));
  try { sessionStorage.setItem(EDITS, Object.keys(edits).length ? JSON.stringify({ of: madeOf(), edits }) : ""); } catch { /* forbidden */ }
};
const giveEdits = () => {
  let kept = null;
  try { kept = JSON.parse(sessionStorage.getItem(EDITS) || "null"); } catch { /* forbidden */ }
  if (kept?.of !== madeOf()) return;
  try { sessionStorage.removeItem(EDITS); } catch { /* forbidden */ }
  trigger("act", { action: "edit", pointer: "", of: reading(), seen: [], edits: kept.edits });
};
if (area?.id === "extract") window.addEventListener("pagehide", keepEdits, { signal: area.links.signal });
watch("value", () => { settle(); mend(); restore(); compare(); explainAgain(); if (area?.id === "extract") giveEdits(); });
