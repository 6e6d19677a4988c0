// What this browser keeps: JSON under a key. It is read anew for every event, and what the event changes is put into
// what stands there by then, for other tabs keep things, too.
const readKept = (key) => {
  let text;
  try { text = localStorage.getItem(key); } catch { text = window.troupeKept?.[key]; }
  try { return JSON.parse(text) || {}; } catch { return {}; }
};
// Gives whether there was room. Where a browser forbids all storage, things are kept as long as the page is open.
const writeKept = (key, value) => {
  const text = JSON.stringify(value);
  try { localStorage.setItem(key, text); } catch (error) {
    if (error.name === "QuotaExceededError") return false;
    (window.troupeKept ??= {})[key] = text;
  }
  return true;
};

// The chats are those of all tabs; which one is open each tab knows itself, and a new tab opens the last one.
const CHATS = "troupe-chats";
const readChats = () => {
  const { current = null, chats } = readKept(CHATS);
  let own = null;
  try { own = sessionStorage.getItem(CHATS); } catch { /* forbidden: as a new tab */ }
  return { current: own ?? current, chats: Array.isArray(chats) ? chats : [] };
};
const changeChats = ({ current, put, removed }) => {
  const gone = new Set([...removed, ...put.map((chat) => chat.id)]);
  const chats = [...put, ...readChats().chats.filter((chat) => !gone.has(chat.id))];
  // The oldest make room.
  while (!writeKept(CHATS, { current, chats }) && chats.length > 1) chats.pop();
  try { sessionStorage.setItem(CHATS, current ?? ""); } catch { /* forbidden */ }
};

// Verified records, each with the time it was kept: the newer one stays, and the oldest make room.
const VERIFIED = "troupe-verified", MAX_VERIFIED = 100;
const readVerified = () => readKept(VERIFIED);
const addVerified = (added) => {
  const kept = readVerified();
  for (const [key, entry] of Object.entries(added || {})) if (!(kept[key]?.time > entry.time)) kept[key] = entry;
  const entries = Object.entries(kept).sort(([, one], [, other]) => one.time - other.time).slice(-MAX_VERIFIED);
  while (!writeKept(VERIFIED, Object.fromEntries(entries)) && entries.length > 1) entries.shift();
};

// The chat's settings, by name: those that are not the defaults, which may be others for another model.
const SETTINGS = "troupe-settings";
const readSettings = () => readKept(SETTINGS);
const writeSettings = (defaults, values) =>
  writeKept(SETTINGS, Object.fromEntries(Object.entries(defaults).map(([name], at) => [name, values[at]]).filter(([name, value]) => value !== defaults[name])));
