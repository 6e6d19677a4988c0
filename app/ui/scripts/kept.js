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
// A note that stays until it is closed, or the next message is entered: above the text box of the chat if that is in
// sight, else over whatever is open.
const warn = (text) => {
  document.querySelector(".page-note")?.remove();
  const note = document.createElement("p"), words = document.createElement("span"), button = document.createElement("button");
  const composer = document.querySelector("#composer");
  Object.assign(button, { type: "button", textContent: "×", title: "Close", onclick: () => note.remove() });
  button.setAttribute("aria-label", "Close the note");
  Object.assign(note, { className: "page-note" }).setAttribute("role", "alert");
  words.textContent = text;
  note.append(words, button);
  if (composer?.offsetParent) composer.before(note);
  else document.body.append(note);
  document.addEventListener("entered", button.onclick, { once: true });
};

// The server keeps the chats; each tab remembers which one it shows: null in a new tab, "" for an empty chat.
const CHATS = "troupe-chats";
const readCurrent = () => { try { return sessionStorage.getItem(CHATS); } catch { return null; } };
const writeCurrent = (id) => { try { sessionStorage.setItem(CHATS, id ?? ""); } catch { /* forbidden */ } };

// Schemas, by their titles.
const SCHEMAS = "troupe-schemas";
const readSchemas = () => readKept(SCHEMAS);
const addSchema = (added) => {
  if (!added || !Object.keys(added).length) return;
  if (!writeKept(SCHEMAS, { ...added, ...readSchemas(), ...added })) warn("This browser has no room left to keep the schema. Clear it to make room, and save it again.");
  else if (window.troupeKept) warn("This browser stores nothing for this page: the schema is gone when the page is closed.");
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
