// The list of chats: search, open, rename, remove and undo that, export, import. `props.value` is what the last event changed in them.
const host = element.querySelector(".chats");
let wanted = "", store = readChats();

const make = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    name.startsWith("on") ? node.addEventListener(name.slice(2), value) : node.setAttribute(name, value);
  node.append(...children);
  return node;
};

const chats = () => store.chats;
// On a narrow screen the list covers the chat.
const close = () => { if (matchMedia("(max-width: 768px)").matches) document.querySelector("#chats.open .toggle-button")?.click(); };
const matches = (chat) => !wanted || [chat.title, ...chat.messages.map((each) => each.content)].join("\n").toLowerCase().includes(wanted);
const day = (seconds) => seconds ? new Date(seconds * 1000).toLocaleDateString(undefined, { day: "numeric", month: "short" }) : "";

const save = () => {
  const file = new Blob([JSON.stringify({ chats: chats() }, null, 1)], { type: "application/json" });
  const link = make("a", { href: URL.createObjectURL(file), download: "troupe-chats.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
};

const search = make("input", { type: "search", placeholder: "Search chats", "aria-label": "Search chats", oninput: (event) => { wanted = event.target.value.toLowerCase(); draw(); } });
const picker = make("input", { type: "file", accept: "application/json,.json", hidden: "", "aria-label": "Chats to import", onchange: async (event) => {
  const file = event.target.files[0];
  event.target.value = "";
  if (file) trigger("bring", { text: await file.text() });
} });
const list = make("ul", {});
const fresh = make("button", { type: "button", class: "fresh", onclick: () => { trigger("fresh"); close(); } }, "New chat");
const tools = make("div", { class: "tools" },
  make("button", { type: "button", onclick: save }, "Export"),
  make("button", { type: "button", onclick: () => picker.click() }, "Import"), picker);
const removed = make("p", { class: "removed", role: "status", hidden: "" });
host.append(fresh, search, list, removed, tools);

const UNDO_MS = 20000;
const remove = (chat) => {
  const wasOpen = chat.id === store.current;
  trigger("drop", { id: chat.id });
  removed.replaceChildren(`Removed “${chat.title}”. `, make("button", { type: "button", onclick: () => {
    removed.hidden = true;
    changeChats({ current: store.current || null, put: [chat], removed: [] });
    reload();
    if (wasOpen) trigger("pick", { id: chat.id });
  } }, "Undo"));
  removed.hidden = false;
  clearTimeout(remove.timer);
  remove.timer = setTimeout(() => { removed.hidden = true; }, UNDO_MS);
};
const rename = (chat, item) => {
  let isDone = false;
  const end = (title) => {
    if (isDone) return;
    isDone = true;
    if (title && title !== chat.title) {
      const chats = readChats().chats.map((each) => each.id === chat.id ? { ...each, title, named: true } : each);
      writeChats(readKept(CHATS).current, chats, [chat.id]);
    }
    reload();
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

const draw = () => {
  const found = chats().filter(matches);
  const empty = chats().length ? "No chat has these words." : "Chats are kept in this browser only.";
  list.replaceChildren(...found.map((chat) => {
    const isOpen = chat.id === store.current;
    const item = make("li", { class: isOpen ? "current" : "", "data-id": chat.id },
      make("button", { type: "button", class: "open", title: chat.title, ...(isOpen ? { "aria-current": "true" } : {}),
        onclick: () => { trigger("pick", { id: chat.id }); close(); }, ondblclick: () => rename(chat, item) }, make("span", {}, chat.title), make("small", {}, day(chat.time))),
      make("button", { type: "button", class: "rename", "aria-label": `Rename ${chat.title}`, title: "Rename", onclick: () => rename(chat, item) }, "✎"),
      make("button", { type: "button", class: "remove", "aria-label": `Remove ${chat.title}`, title: "Remove", onclick: () => remove(chat) }, "×"));
    return item;
  }));
  if (!found.length) list.append(make("li", { class: "none" }, empty));
};
const reload = () => { store = readChats(); draw(); };
const take = () => {
  const change = props.value;
  // After a redraw the component still has its last change, which has already been applied.
  if (change?.id && change.id !== window.troupeLastChange) {
    window.troupeLastChange = change.id;
    changeChats(change);
    if (change.problem) warn(change.problem);
  }
  reload();
};
// Changes by other tabs; without a key the whole storage was cleared.
window.addEventListener("storage", ({ key }) => {
  if (!element.isConnected || (key !== CHATS && key !== null)) return;
  // Update only the chat that this tab has opened; an empty tab stays empty.
  let own = null;
  try { own = sessionStorage.getItem(CHATS); } catch { /* forbidden */ }
  const open = () => store.chats.find((chat) => chat.id === own);
  const before = JSON.stringify(open()?.messages);
  if (list.contains(document.activeElement) && document.activeElement.tagName === "INPUT") return;
  reload();
  // The open chat has grown in another tab; a chat that this tab writes is merged when its turn ends.
  const isWriting = document.querySelector("#growing .message-row") || document.querySelector("#chatbot textarea");
  if (open() && !isPending(open()) && JSON.stringify(open().messages) !== before && !isWriting) trigger("pick", { id: store.current });
});
watch("value", take);
take();
