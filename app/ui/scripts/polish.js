// Accessible names for elements that Gradio leaves without one; screen readers, voice control and tests use them.
const NAMES = [
  ["#composer textarea", "Message"],
  ["#chats .toggle-button", "Chats"],
  ["#settings .toggle-button", "Settings"],
  ["#talk", "Conversation"],
  ["#chatbot .bubble-wrap", "Messages"],
  ["#growing .bubble-wrap", "Answer being written"],
  ["#batch-files button.upload-container", "Drop File Here - or - Click to Upload"],
  ["#samples input", "Example texts"],
  ["#schema .cm-content", "JSON Schema"],
];
const name = () => {
  for (const [selector, label] of NAMES)
    for (const node of document.querySelectorAll(selector)) if (node.getAttribute("aria-label") !== label) node.setAttribute("aria-label", label);
  for (const side of document.querySelectorAll(".sidebar")) {
    const button = side.querySelector(".toggle-button"), isOpen = side.classList.contains("open");
    if (button && button.getAttribute("aria-expanded") !== String(isOpen)) button.setAttribute("aria-expanded", String(isOpen));
    // Hidden elements must not be reachable with the Tab key.
    const content = side.querySelector(".sidebar-content");
    if (content && content.inert === isOpen) content.inert = !isOpen;
  }
  // Under one name the choices are one stop of the Tab key, and arrow keys move among them.
  for (const box of document.querySelectorAll(".chips input")) {
    const { id } = box.closest(".chips");
    if (box.name !== id) box.name = id;
  }
  for (const box of document.querySelectorAll("#talk li input[type=checkbox]:not([aria-label])")) box.setAttribute("aria-label", box.parentElement.textContent.trim() || "Task");
  for (const box of document.querySelectorAll("#talk div[data-testid][aria-label]:not([role])")) {
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", asTyped(box.getAttribute("aria-label")));
  }
  for (const box of document.querySelectorAll("#chatbot .user-row textarea:not([data-typed])")) {
    box.dataset.typed = "yes";
    box.value = asTyped(box.value);
    box.dispatchEvent(new Event("input", { bubbles: true }));
  }
  // Gradio calls the examples a list, but its items are buttons.
  for (const box of document.querySelectorAll("#chatbot .examples[role=list]")) { box.setAttribute("role", "group"); box.setAttribute("aria-label", "Examples"); }
  const talk = document.querySelector("#talk");
  if (talk && !talk.dataset.pinned) { talk.dataset.pinned = "yes"; pin(talk); linkImages(talk); }
  restoreDrafts();
  openLink();
  keepFocus();
  for (const box of document.querySelectorAll(".cm-scroller, #talk, #talk pre")) if (box.tabIndex !== 0) box.tabIndex = 0;
};
// A question's HTML stands in the page as references (conversation.py), which are for display only.
const asTyped = (text) => text.replace(/&#00(38|60);/g, (_, code) => String.fromCharCode(code));
const clipboard = navigator.clipboard, copy = clipboard?.writeText.bind(clipboard);
if (copy) clipboard.writeText = (text) => copy(asTyped(text));
// The conversation stays at its end while it grows, unless a person has scrolled up to read; what was just asked is
// always shown. Not by a reversed column: there every new line moves, and draws, all that stands above it.
const pin = (talk) => {
  let isPinned = true, size = 0, moved = -Infinity, edited = null;
  const measure = () => talk.scrollHeight + talk.clientHeight;
  const follow = () => {
    size = measure();
    isPinned ||= talk.scrollHeight <= talk.clientHeight;
    const box = talk.querySelector("#chatbot .user-row textarea"); // a question that is edited stays in sight
    if (box && box !== edited) { isPinned = false; box.scrollIntoView({ block: "nearest" }); box.focus({ preventScroll: true }); }
    edited = box;
    if (isPinned && !box) talk.scrollTop = talk.scrollHeight;
    down.hidden = isPinned;
  };
  for (const kind of ["wheel", "touchmove", "keydown"]) talk.addEventListener(kind, () => { moved = performance.now(); }, { passive: true });
  talk.addEventListener("scroll", () => {
    // A redrawn history scrolls, too; it has another size then, and nobody has moved it.
    const isAtEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80;
    if (isAtEnd || size === measure() || performance.now() - moved < 500) isPinned = isAtEnd;
  }, { passive: true });
  const down = document.createElement("button");
  Object.assign(down, { type: "button", className: "to-end", textContent: "↓", title: "To the end", hidden: true });
  down.setAttribute("aria-label", "To the end of the conversation");
  down.onclick = () => { isPinned = true; follow(); };
  talk.after(down);
  talk.addEventListener("scroll", () => { down.hidden = isPinned; }, { passive: true });
  const observer = new ResizeObserver(follow);
  for (const box of [talk, talk.firstElementChild]) if (box) observer.observe(box);
  talk.addEventListener("click", ({ target }) => {
    if (target.closest('#chatbot [aria-label="Edit"]')) setTimeout(follow); // when Gradio has drawn the box
    if (target.closest('#chatbot [aria-label="Submit"]')) isPinned = true;
  }, true);
  document.addEventListener("entered", () => { isPinned = true; follow(); });
};
// Escape stops an answer; Control or Command and Enter sends from anywhere, and extracts in its tab.
const isVisible = (node) => node && node.offsetParent !== null && !node.disabled;
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.defaultPrevented && !document.querySelector("#chatbot textarea")) {
    const stop = [...document.querySelectorAll("#composer .stop-button, button.stop")].find(isVisible);
    stop?.click();
  } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    const go = [...document.querySelectorAll("#composer .submit-button, #run, #batch-run")].find(isVisible);
    if (go) { event.preventDefault(); go.click(); }
  }
});
// An edited question: Enter asks it, Escape leaves it as it was, and so does opening another chat or version, because
// Gradio would edit the message that takes its place.
const endEdit = (isAsked) => {
  const box = document.querySelector("#chatbot .user-row textarea");
  const [ask, cancel] = box?.closest(".message-row").nextElementSibling.querySelectorAll("button") ?? [];
  (isAsked ? ask : cancel)?.click();
};
document.addEventListener("keydown", (event) => {
  const { key, shiftKey, isComposing, target } = event;
  if (shiftKey || isComposing || !["Enter", "Escape"].includes(key) || !target.matches?.("#chatbot .user-row textarea")) return;
  event.preventDefault();
  event.stopImmediatePropagation();
  endEdit(key === "Enter");
  document.querySelector("#composer textarea")?.focus();
}, true);
document.addEventListener("click", ({ target }) => { if (target.closest?.(".chats :is(.fresh, .open, .remove), .branch button")) endEdit(false); }, true);
// Where a pressed button gives way to another one, such as Extract to Stop, the focus goes there.
let pressed = null;
document.addEventListener("focusin", ({ target }) => { pressed = target.matches("button") ? { button: target, row: target.parentElement } : null; });
document.addEventListener("pointerdown", () => { pressed = null; }, true);
const keepFocus = () => {
  if (!pressed || document.activeElement !== document.body || isVisible(pressed.button)) return;
  [...pressed.row.querySelectorAll("button.stop, button.primary")].find(isVisible)?.focus({ preventScroll: true });
};
// Arrow keys move between tabs.
document.addEventListener("keydown", (event) => {
  const list = event.target.role === "tab" && !("index" in event.target.dataset) && event.target.closest('[role="tablist"]');
  const tabs = list ? [...list.querySelectorAll('[role="tab"]')].filter(isVisible) : [];
  const to = { ArrowRight: tabs.indexOf(event.target) + 1, ArrowLeft: tabs.indexOf(event.target) - 1, Home: 0, End: -1 }[event.key];
  if (to === undefined || !tabs.length) return;
  event.preventDefault();
  const tab = tabs.at(to % tabs.length);
  tab.focus();
  tab.click();
  setTimeout(() => tab.focus(), 100); // the composer takes the focus when it appears
});
// The address names the open tab, and the open chat, so that a link leads there.
const tabOf = (name) => document.querySelector(`#tabs > .tab-wrapper [aria-controls="${name}-tab"]`);
let wanted = location.hash.slice(1);
// A reload shows the chat that this tab has chosen, which the address may not name yet.
try {
  const isReload = performance.getEntriesByType("navigation")[0]?.type === "reload";
  if (isReload && sessionStorage.getItem("troupe-chats") !== null) [wanted] = wanted.split("/");
} catch { /* forbidden */ }
const openLink = () => {
  const [name, chat] = wanted.split("/"), tab = name && tabOf(name);
  if (tab && tab.getAttribute("aria-selected") !== "true") { tab.click(); return; }
  const entry = chat && document.querySelector(`.chats li[data-id="${CSS.escape(chat)}"] .open`);
  if (chat && !entry && document.querySelector("#chats li.none") === null) return;
  entry?.closest("li.current") || entry?.click();
  if (tab || !name) wanted = "";
  if (!wanted) showLink();
};
const showLink = () => {
  const name = document.querySelector('#tabs > .tab-wrapper [role="tab"][aria-selected="true"]')?.getAttribute("aria-controls")?.replace(/-tab$/, "");
  const chat = name === "chat" && document.querySelector(".chats li.current")?.dataset.id;
  const hash = !name || (name === "extract" && !location.hash) ? location.hash : `#${name}${chat ? `/${chat}` : ""}`;
  if (hash !== location.hash) history.replaceState(history.state, "", hash);
};
// Extract's address typed into a page that was opened elsewhere is a visit, which begins with the example.
const isFirstVisit = () => {
  try { if (sessionStorage.getItem("troupe-project")) return false; } catch { /* forbidden */ }
  return location.hash === "#extract" && !document.querySelector("#source textarea")?.value && !document.querySelector("#extract .record");
};
window.addEventListener("hashchange", () => {
  if (isFirstVisit()) { location.reload(); return; }
  wanted = location.hash.slice(1);
  openLink();
});
// A file dropped while Extract is open is opened there; no dropped file takes the place of the app.
for (const kind of ["dragover", "dragleave", "drop"]) document.addEventListener(kind, (event) => {
  if (!event.dataTransfer?.types.includes("Files")) return;
  const page = document.querySelector("#extract"), isTaken = Boolean(isVisible(page));
  page?.classList.toggle("dropping", isTaken && (kind === "dragover" || (kind === "dragleave" && event.relatedTarget !== null)));
  if (kind !== "dragleave") event.preventDefault();
  if (!isTaken) return;
  event.stopPropagation(); // the editor of the schema would write the file's text into it
  const input = document.querySelector("#open-file").parentElement.querySelector("input[type=file]");
  if (kind !== "drop" || !input) return;
  input.files = event.dataTransfer.files;
  input.dispatchEvent(new Event("change", { bubbles: true }));
}, true);
// Gradio opens a list when it gets the focus, which it keeps when Escape closes it.
document.addEventListener("mousedown", ({ target }) => {
  if (target === document.activeElement && target.matches('[role="combobox"][aria-expanded="false"]')) target.blur();
}, true);
// A theme chosen here takes precedence over the system's.
const THEME = "troupe-theme";
const setTheme = (theme) => {
  document.body.classList.toggle("dark", theme === "dark");
  try { localStorage.setItem(THEME, theme); } catch { /* forbidden */ }
};
try { const theme = localStorage.getItem(THEME); if (theme && !location.search.includes("__theme=")) setTheme(theme); } catch { /* forbidden */ }
document.addEventListener("click", (event) => {
  if (event.target.closest?.(".strip .theme")) setTheme(document.body.classList.contains("dark") ? "light" : "dark");
});
// Images of other hosts are not loaded (the page's policy forbids it, because a request would reveal the reader): a link
// stands for each. The image stays where it is, hidden, because Gradio removes what it has drawn node by node.
const linkImages = (talk) => {
  const images = talk.getElementsByTagName("img"), links = talk.getElementsByClassName("remote-image");
  const update = () => {
    for (const link of [...links]) if (!link.image?.isConnected) link.remove();
    for (const image of images) {
      // This server's images are those of the chat's files.
      if (image.dataset.remote || !/^https?:/.test(image.src) || image.src.startsWith(`${location.origin}/gradio_api/file=`)) continue;
      image.dataset.remote = "yes";
      image.style.display = "none";
      if (image.closest(".title")) continue; // a button, which must hold no link
      const link = document.createElement("a");
      Object.assign(link, { className: "remote-image", href: image.src, title: image.src, target: "_blank", rel: "noopener noreferrer", image });
      link.textContent = `Image: ${image.alt || image.src}`;
      image.after(link);
    }
  };
  new MutationObserver(update).observe(talk, { childList: true, subtree: true });
  update();
};
// The fonts are 150 kB, a fifth of a first visit's bytes: on a slow network they come when the page can be used.
// Not 600: Gradio's semi-bold files are subsets without most letters. Browsers take 700 for it.
const SLOW_MS = 4000, WEIGHTS = { 400: "Regular", 700: "Bold" };
const loadFonts = () => {
  for (const family of ["IBM Plex Sans", "IBM Plex Mono"])
    for (const [weight, word] of Object.entries(WEIGHTS)) {
      const name = family.replaceAll(" ", "");
      document.fonts.add(new FontFace(family, `url("${window.gradio_config.root}/static/fonts/${name}/${name}-${word}.woff2")`, { weight }));
    }
};
if (performance.now() < SLOW_MS) loadFonts();
else setTimeout(loadFonts, performance.now()); // as long again
// The strip as the server has it now. A server that does not answer is named in it.
const PERIOD_MS = 1000, PATIENCE_MS = 5000;
const whenIdle = globalThis.requestIdleCallback ?? setTimeout;
const LOST = '<span class="state stopped"><i></i>not reachable</span>';
// A new server process knows nothing of this page, which therefore loads again. The same one may have taken the page for
// closed: what the page shows is opened there again.
const comeBack = async () => {
  const { root, api_prefix: prefix, app_id: known } = window.gradio_config;
  const now = await fetch(`${root}${prefix}/app_id`).then((reply) => reply.json()).catch(() => null);
  if (now && now.app_id !== known) location.reload();
  else document.dispatchEvent(new Event("back"));
};
let isAway = false;
const refreshStrip = async () => {
  let isLost = document.hidden;
  if (!isLost) {
    // A page that is busy takes the reply late: only one that has nothing else to do misses it.
    const late = new Promise((resolve) => setTimeout(whenIdle, PATIENCE_MS, () => resolve()));
    const strip = await Promise.race([server.refresh(), late]); // undefined also if the request has failed
    props.value = strip || props.value.replace(/<span class="state[^]*?<\/span>/, LOST);
    isLost = !strip;
    if (isAway && !isLost) comeBack();
  }
  isAway = isLost;
  setTimeout(refreshStrip, PERIOD_MS);
};
// After a restart of the server the page loads again; restore the text that was typed and not sent.
const DRAFTS = ["#composer textarea", "#source textarea"];
const keepDrafts = () => {
  const name = document.querySelector("#source-name span");
  // An example that was not changed is no draft: without a project the page opens with the example and its record.
  const isExample = name?.dataset.name.startsWith("Example: ") && name.textContent === name.dataset.name;
  for (const selector of DRAFTS) {
    const unsent = selector === DRAFTS[0] ? globalThis.outbox?.unsent ?? [] : [];
    const typed = isExample && selector === DRAFTS[1] ? "" : document.querySelector(selector)?.value;
    const draft = [...unsent, typed].filter(Boolean).join("\n");
    try { sessionStorage.setItem(`troupe-draft ${selector}`, draft); } catch { /* forbidden, or too long */ }
  }
};
const restoreDrafts = () => {
  for (const selector of DRAFTS) {
    const box = document.querySelector(selector);
    if (!box || box.dataset.restored) continue;
    box.dataset.restored = "yes";
    let draft = "";
    try { draft = sessionStorage.getItem(`troupe-draft ${selector}`); } catch { /* forbidden */ }
    if (!draft || box.value) continue;
    box.value = draft;
    box.dispatchEvent(new Event("input", { bubbles: true }));
  }
};
let isDue = false;
new MutationObserver(() => {
  if (isDue) return;
  isDue = true;
  setTimeout(() => { isDue = false; name(); }, 200);
}).observe(document.body, { childList: true, subtree: true, attributes: true, attributeFilter: ["class"] });
name();
document.documentElement.lang ||= "en";
window.addEventListener("pagehide", keepDrafts);
refreshStrip();

// A press of Extract waits for a text or a schema that was chosen and is on its way.
globalThis.changes = {
  begin() { this.isOnItsWay = true; },
  end() {
    const { isPressed } = this;
    this.isOnItsWay = this.isPressed = false;
    if (isPressed) setTimeout(() => document.querySelector("#run")?.click());
  },
};
document.addEventListener("change", ({ target }) => { if (target.closest?.("#extract .chips")) changes.begin(); }, true);
document.addEventListener("click", (event) => {
  if (!changes.isOnItsWay || !event.target.closest?.("#run")) return;
  event.stopImmediatePropagation();
  changes.isPressed = true;
}, true);
