// The list of chats: search, open, remove, export, import. `props.value` is what the last event changed in them.
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
const fresh = make("button", { type: "button", class: "fresh", onclick: () => trigger("fresh") }, "New chat");
const tools = make("div", { class: "tools" },
  make("button", { type: "button", onclick: save }, "Export"),
  make("button", { type: "button", onclick: () => picker.click() }, "Import"), picker);
const problem = make("p", { class: "problem", role: "alert", hidden: "" });
host.append(fresh, search, list, tools, problem);

const draw = () => {
  const found = chats().filter(matches);
  const empty = chats().length ? "No chat has these words." : "Chats are kept in this browser only.";
  list.replaceChildren(...found.map((chat) => make("li", { class: chat.id === store.current ? "current" : "" },
    make("button", { type: "button", class: "open", title: chat.title, ...(chat.id === store.current ? { "aria-current": "true" } : {}),
      onclick: () => trigger("pick", { id: chat.id }) }, chat.title, make("small", {}, day(chat.time))),
    make("button", { type: "button", class: "remove", "aria-label": `Remove ${chat.title}`, onclick: () => trigger("drop", { id: chat.id }) }, "×"))));
  if (!found.length) list.append(make("li", { class: "none" }, empty));
  problem.textContent = props.value?.problem || "";
  problem.hidden = !problem.textContent;
};
const reload = () => { store = readChats(); draw(); };
const take = () => {
  const change = props.value;
  // Drawn anew, the component has its last change still; it was made then.
  if (change?.id && change.id !== window.troupeLastChange) {
    window.troupeLastChange = change.id;
    changeChats(change);
  }
  reload();
};
// What other tabs change; without a key everything was cleared.
window.addEventListener("storage", ({ key }) => { if (element.isConnected && (key === CHATS || key === null)) reload(); });
watch("value", take);
take();
