// The list of chats: search, open, rename, remove and undo that, export, import. `props.value` is the server's last list.
const host = element.querySelector(".chats");
let wanted = "", store = { chats: [], current: null, leaf: null };

// On a narrow screen the list covers the chat.
const narrow = matchMedia("(max-width: 768px)");
const close = () => { if (narrow.matches && element.isConnected) document.querySelector("#chats.open .toggle-button")?.click(); };
narrow.addEventListener("change", close);
// On a wide one there is room for both, unless the list was closed.
const CLOSED = "troupe-chats-closed", NUM_TRIES = 20, TRY_MS = 150;
const openIfWide = (number = 0) => {
  const side = document.querySelector("#chats"), button = side?.querySelector(".toggle-button");
  const isWide = matchMedia("(min-width: 1280px)").matches;
  let isClosed = false;
  try { isClosed = localStorage.getItem(CLOSED) !== null; } catch { /* forbidden */ }
  // Gradio ignores, or undoes, a click that comes before its page is complete.
  if (isWide && !isClosed && button && !side.classList.contains("open")) button.click();
  if (number < NUM_TRIES && !isClosed) setTimeout(openIfWide, TRY_MS, number + 1);
};
document.addEventListener("click", ({ isTrusted, target }) => {
  if (!isTrusted || innerWidth < 1280 || !target.closest?.("#chats .toggle-button")) return;
  try { if (document.querySelector("#chats.open")) localStorage.setItem(CLOSED, "yes"); else localStorage.removeItem(CLOSED); } catch { /* forbidden */ }
}, true);
openIfWide();
const day = (seconds) => seconds ? new Date(seconds * 1000).toLocaleDateString(undefined, { day: "numeric", month: "short" }) : "";

const save = (text) => {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: "troupe-chats.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
};

let typing;
const search = make("input", { type: "search", placeholder: "Search chats (Ctrl+K)", "aria-label": "Search chats", oninput: (event) => {
  wanted = event.target.value;
  clearTimeout(typing);
  typing = setTimeout(() => trigger("search", { text: wanted }), 200);
} });
const picker = make("input", { type: "file", accept: "application/json,.json", hidden: "", "aria-label": "Chats to import", onchange: async (event) => {
  const file = event.target.files[0];
  event.target.value = "";
  if (file) trigger("bring", { text: await file.text() });
} });
const list = make("ul", {});
// What is typed and not sent stays with its chat, "" is a new one; it is away at once, because the next one may be typed.
const drafts = new Map();
let draftOf = "";
const changeDraft = (id) => {
  const box = document.querySelector("#composer textarea");
  drafts.set(draftOf, box.value);
  box.value = drafts.get(id) ?? "";
  drafts.delete(id);
  box.dispatchEvent(new Event("input", { bubbles: true }));
  draftOf = id;
};
// The last chosen chat counts at once, for the next question and for a reload, before the page shows it.
let chosen = null;
const choose = (id) => { changeDraft(id); chosen = id; writeCurrent(id); };
const begin = () => {
  choose("");
  trigger("fresh");
  if (narrow.matches) close();
  else document.querySelector("#composer textarea").focus();
};
const fresh = make("button", { type: "button", class: "fresh", title: "Ctrl+Shift+O", onclick: begin }, "New chat");
const tools = make("div", { class: "tools" },
  make("button", { type: "button", onclick: () => trigger("export") }, "Export"),
  make("button", { type: "button", onclick: () => picker.click() }, "Import"), picker);
const removed = make("p", { class: "removed", role: "status", hidden: "" });
const where = make("p", { class: "where" });
host.append(fresh, search, list, removed, tools, where);
document.addEventListener("keydown", (event) => {
  const { key, shiftKey, ctrlKey, metaKey } = event, pressed = `${shiftKey ? "shift " : ""}${key.toLowerCase()}`;
  if (!element.isConnected || !(ctrlKey || metaKey) || !document.querySelector("#composer")?.offsetParent) return;
  if (pressed === "shift o") fresh.click();
  else if (pressed === "k") {
    document.querySelector("#chats:not(.open) .toggle-button")?.click();
    element.closest(".sidebar-content").inert = false; // as that of a closed list
    search.focus({ preventScroll: true });
  } else return;
  event.preventDefault();
});

const UNDO_MS = 20000;
const offerUndo = ({ text, was_open }) => {
  const { title } = JSON.parse(text).chats[0] || {};
  if (!title) return;
  removed.replaceChildren(`Removed “${title}”. `, make("button", { type: "button", onclick: () => {
    removed.hidden = true;
    trigger("bring", { text, opens: was_open });
  } }, "Undo"));
  removed.hidden = false;
  clearTimeout(offerUndo.timer);
  offerUndo.timer = setTimeout(() => { removed.hidden = true; }, UNDO_MS);
};
const rename = (chat, item) => {
  let isDone = false;
  const end = (title) => {
    if (isDone) return;
    isDone = true;
    const known = store.chats.find(({ id }) => id === chat.id);
    if (title && title !== chat.title && known) {
      known.title = title;
      trigger("rename", { id: chat.id, title });
    }
    item.drawnOf = null; // it holds the text box
    draw();
    list.querySelector(`[data-id="${chat.id}"] .open`)?.focus();
  };
  const input = make("input", { type: "text", value: chat.title, maxlength: "60", "aria-label": "Title of the chat",
    onblur: () => end(input.value.trim()),
    onkeydown: (event) => {
      event.stopPropagation();
      if (event.key === "Enter") end(input.value.trim());
      if (event.key === "Escape") end("");
    } });
  item.replaceChildren(input);
  input.select();
};

const drawChat = ({ empty, id, title, date }) => {
  if (empty) return make("li", { class: "none" }, empty);
  const item = make("li", { "data-id": id },
    make("button", { type: "button", class: "open", title, onclick: () => { choose(id); trigger("pick", { id }); close(); }, ondblclick: () => rename({ id, title }, item) }, make("span", {}, title), make("small", {}, date)),
    make("button", { type: "button", class: "rename", "aria-label": `Rename ${title}`, title: "Rename", onclick: () => rename({ id, title }, item) }, "✎"),
    make("button", { type: "button", class: "remove", "aria-label": `Remove ${title}`, title: "Remove", onclick: () => trigger("drop", { id }) }, "×"));
  return item;
};
const draw = () => {
  const empty = wanted ? "No chat has these words." : "There are no chats yet.";
  const shown = store.chats.map(({ id, title, time }) => ({ id, title, date: day(time) }));
  drawList(list, shown.length ? shown : [{ empty }], drawChat);
  for (const item of list.querySelectorAll("[data-id]")) {
    const isOpen = item.dataset.id === store.current;
    item.classList.toggle("current", isOpen);
    item.querySelector(".open").ariaCurrent = isOpen ? "true" : null;
  }
};
// Other tabs of this browser show the same chats.
const others = new BroadcastChannel(CHATS);
const isRenaming = () => list.contains(document.activeElement) && document.activeElement.tagName === "INPUT";
const take = () => {
  const value = props.value;
  // After a redraw the component still has its last value, which has already been taken.
  if (!value?.id || value.id === window.troupeLastChange) return;
  window.troupeLastChange = value.id;
  if (value.problem) warn(value.problem);
  if (value.file) save(value.file);
  if (value.removed) offerUndo(value.removed);
  if (value.is_taken) dropOld();
  if (value.where) where.textContent = value.where;
  if (!value.chats) return;
  const isNews = !value.is_search && JSON.stringify(value.chats) !== JSON.stringify(store.chats);
  store = value;
  globalThis.shownChat = store.current;
  if (chosen === store.current || !store.leaf) chosen = null; // an empty chat is a new one, or replaces one that was removed
  if (chosen === null) {
    writeCurrent(store.current);
    draftOf = store.leaf ? store.current : "";
  }
  if (wanted && !value.is_search) trigger("search", { text: wanted });
  else if (!isRenaming()) draw();
  if (isNews && !take.isQuiet) others.postMessage("changed");
  // The open chat has grown in another tab; one that this tab writes is shown when its turn ends.
  const open = store.chats.find(({ id }) => id === store.current);
  const isWriting = document.querySelector("#growing .message-row") || document.querySelector("#chatbot textarea");
  if (take.isQuiet && open && open.leaf !== store.leaf && !isWriting) trigger("pick", { id: store.current });
  take.isQuiet = false;
};
others.onmessage = () => {
  if (!element.isConnected) return others.close();
  take.isQuiet = true;
  trigger("search", { text: wanted });
};
// Chats that an older version kept in this browser go to the server, once.
const readOld = () => { const { chats } = readKept(CHATS); return Array.isArray(chats) && chats.length ? chats : null; };
const dropOld = () => { try { for (const key of [CHATS, "troupe-partial"]) localStorage.removeItem(key); } catch { /* forbidden */ } };
watch("value", take);
take();
if (readOld()) setTimeout(() => trigger("bring", { text: JSON.stringify({ chats: readOld() }), is_old: true }), 1000);
