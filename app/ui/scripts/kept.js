// The browser's storage: JSON under a key. It is read again for every event, and the event's changes are merged into its
// present content, because other tabs write to it too.
const readKept = (key) => {
  let text;
  try { text = localStorage.getItem(key); } catch { text = window.troupeKept?.[key]; }
  try { return JSON.parse(text) || {}; } catch { return {}; }
};
// Returns whether there was room. If the browser forbids storage, values are kept while the page is open.
const writeKept = (key, value) => {
  const text = JSON.stringify(value);
  try { localStorage.setItem(key, text); } catch (error) {
    if (error.name === "QuotaExceededError") return false;
    (window.troupeKept ??= {})[key] = text;
  }
  return true;
};
// A note that stays until it is closed, over whatever is open.
const warn = (text) => {
  const note = document.querySelector("body > .page-note") || document.createElement("p");
  Object.assign(note, { className: "page-note", textContent: text, title: "Close", onclick: () => note.remove() });
  note.setAttribute("role", "alert");
  document.body.append(note);
};

// All tabs share the chats. Each tab remembers which one is open; a new tab opens the latest.
// A chat for which there is no room stays in `troupeApart` while the page is open: nothing is dropped in its favour.
const CHATS = "troupe-chats", PARTIAL = "troupe-partial";
const readList = () => { const { chats } = readKept(CHATS); return Array.isArray(chats) ? chats : []; };
const isPending = (chat) => chat.messages.at(-1)?.metadata?.status === "pending";
const readChats = () => {
  const { current = null } = readKept(CHATS), partial = readKept(PARTIAL), apart = window.troupeApart || [];
  const chats = [...apart, ...readList().filter((chat) => !apart.some(({ id }) => id === chat.id))];
  let own = null;
  try { own = sessionStorage.getItem(CHATS); } catch { /* forbidden: as a new tab */ }
  // The displayed part of an unfinished answer replaces the empty answer.
  const fill = (chat) => partial[chat.id] && isPending(chat)
    ? { ...chat, messages: [...chat.messages.slice(0, -2), ...partial[chat.id], chat.messages.at(-1)] } : chat;
  return { current: own ?? current, chats: chats.map(fill) };
};
const readOpenChat = () => {
  const { current, chats } = readChats();
  return { current, chats: chats.filter((chat) => chat.id === current) };
};
// A turn that another tab wrote after the server had read the chat stays, as another version.
const addUnseen = (old, chat, seen) => {
  const ids = old.messages.map(({ metadata }) => metadata?.title && metadata.id).filter((id) => id && id !== "reasoning");
  if (ids.every((id) => seen.has(id))) return chat;
  let at = 0;
  while (at < chat.messages.length && old.messages[at]?.role === chat.messages[at].role && old.messages[at].content === chat.messages[at].content) at++;
  if (at === chat.messages.length) return { ...chat, messages: old.messages };
  const fork = chat.forks.find((each) => each.at === at) || { at, active: 0, tails: [null] };
  fork.tails.splice(fork.active++, 0, { messages: old.messages.slice(at), forks: old.forks.filter((each) => each.at > at) });
  return chat.forks.includes(fork) ? chat : { ...chat, forks: [...chat.forks, fork] };
};
const writeChats = (current, chats, changed) => {
  const apart = window.troupeApart || [];
  window.troupeApart = [];
  if (writeKept(CHATS, { current, chats })) return;
  const ids = new Set([...changed, ...apart.map((chat) => chat.id)]), left = new Set(chats.map((chat) => chat.id));
  window.troupeApart = chats.filter((chat) => ids.has(chat.id));
  writeKept(CHATS, { current, chats: readList().filter((chat) => left.has(chat.id)) });
  const names = window.troupeApart.map((chat) => `“${chat.title}”`).join(", ");
  if (names) warn(`This browser has no room left to keep ${names}. It is lost when this page closes: export the chats, or remove others to make room.`);
};
const changeChats = ({ current, put, removed }) => {
  const { current: open, chats: before } = readChats(), partial = readKept(PARTIAL);
  if (current === undefined) current = open;
  const gone = new Set([...removed, ...put.map((chat) => chat.id)]);
  const join = ({ seen, ...chat }) => {
    const old = before.find((each) => each.id === chat.id);
    const named = old?.named && !chat.named ? { ...chat, title: old.title, named: true } : chat;
    return old && seen ? addUnseen(old, named, new Set(seen)) : named;
  };
  const chats = [...put.map(join), ...before.filter((chat) => !gone.has(chat.id))];
  for (const id of gone) delete partial[id];
  writeKept(PARTIAL, partial);
  writeChats(current, chats, put.map((chat) => chat.id));
  try { sessionStorage.setItem(CHATS, current ?? ""); } catch { /* forbidden */ }
};
// Called with every update of an answer; written at most twice a second, and when the page is left.
const keepPartial = (messages) => {
  const id = readChats().current;
  const text = ({ content }) => typeof content === "string" ? content : (content || []).map((block) => block.text || "").join("");
  const written = (messages || []).filter(({ role }) => role === "assistant").map((message) => ({
    role: "assistant", content: text(message), ...(message.metadata?.title ? { metadata: { title: message.metadata.title, id: message.metadata.id || "", status: "done" } } : {}),
  }));
  if (!id || !written.some(({ content }) => content && content !== "…")) return;
  const state = window.troupePartial ??= {};
  state.write = () => { state.write = null; writeKept(PARTIAL, { ...readKept(PARTIAL), [id]: written }); };
  if (!state.timer) state.timer = setTimeout(() => { state.timer = null; state.write?.(); }, 500);
  if (!state.isHeard) { state.isHeard = true; window.addEventListener("pagehide", () => state.write?.()); }
};

// Verified records, each with the time it was kept: the newer one stays.
const VERIFIED = "troupe-verified";
const readVerified = () => readKept(VERIFIED);
const addVerified = (added) => {
  const kept = readVerified();
  for (const [key, entry] of Object.entries(added || {})) if (!(kept[key]?.time > entry.time)) kept[key] = entry;
  if (!writeKept(VERIFIED, kept)) warn("This browser has no room left to keep the verified record. Remove chats to make room, and verify it again.");
};

// Schemas, by their titles.
const SCHEMAS = "troupe-schemas";
const readSchemas = () => readKept(SCHEMAS);
const addSchema = (added) => {
  if (!added || !Object.keys(added).length) return;
  if (!writeKept(SCHEMAS, { ...added, ...readSchemas(), ...added })) warn("This browser has no room left to keep the schema. Remove chats to make room, and save it again.");
};

// The id of the last batch: of this tab, or of any for a new tab.
const BATCH = "troupe-batch-run";
const readBatch = () => { try { return sessionStorage.getItem(BATCH) ?? localStorage.getItem(BATCH) ?? ""; } catch { return ""; } };
const writeBatch = (id) => { for (const kind of ["sessionStorage", "localStorage"]) try { window[kind].setItem(BATCH, id); } catch { /* forbidden, or full */ } };

// The chat's settings, by name: those that are not the defaults, which may be others for another model.
const SETTINGS = "troupe-settings";
const readSettings = () => readKept(SETTINGS);
const writeSettings = (defaults, values) =>
  writeKept(SETTINGS, Object.fromEntries(Object.entries(defaults).map(([name], at) => [name, values[at]]).filter(([name, value]) => value !== defaults[name])));
