// Messages that were entered and not yet sent: one at a time, in order, each in its own chat. The text box is emptied when
// a message is entered, so what is typed next belongs to the next one. `props.value` is the server's reply to the last.
const BOX = "#composer textarea", PATIENCE_MS = 200;
const find = (selector) => document.querySelector(selector);
const type = (text) => {
  const box = find(BOX);
  box.value = text;
  box.dispatchEvent(new Event("input", { bubbles: true }));
};
const waiting = []; // {id, chat, text, files}
// A reload keeps waiting messages; a message that is being sent, or whose files are, becomes the draft.
const KEPT = "troupe-outbox";
const isKept = ({ id, files }) => files && id !== sent;
window.addEventListener("pagehide", () => { try { sessionStorage.setItem(KEPT, JSON.stringify(waiting.filter(isKept))); } catch { /* forbidden */ } });
try {
  waiting.push(...JSON.parse(sessionStorage.getItem(KEPT)) ?? []);
  sessionStorage.removeItem(KEPT); // a duplicate of this tab would send them, too
} catch { /* forbidden */ }
let number = Math.max(0, ...waiting.map(({ id }) => id)), sent = null; // the id that is on its way
let isTaking = false; // the files of the text box, for the message that was entered with them
const isUploading = () => find("#composer .thumbnails [role=status]") !== null;
const isHere = ({ chat }) => (chat ?? readCurrent()) === readCurrent();
const list = element.querySelector(".outbox");
const draw = () => {
  const shown = waiting.filter((message) => isHere(message) && message.id !== sent).map(({ id, text }) => ({ id, text }));
  drawList(list, shown, ({ id, text }) => make("li", {},
    make("span", { title: text }, text || "Files"), make("small", {}, "is sent after this answer"),
    make("button", { type: "button", "aria-label": `Take back ${text}`, title: "Take back", onclick: () => takeBack(waiting.find((each) => each.id === id)) }, "×")));
};
const takeBack = (message) => {
  waiting.splice(waiting.indexOf(message), 1);
  outbox.returned.push(message);
  trigger("give_back");
  draw();
};
const enter = (event) => {
  const box = find(BOX), text = box.value.trim();
  const hasFiles = find("#composer .thumbnail-item") !== null || isUploading();
  event.preventDefault();
  event.stopImmediatePropagation();
  if (!text && !hasFiles) return;
  const message = { id: ++number, chat: (globalThis.chatEvents && readCurrent()) || null, text, files: hasFiles ? null : [] };
  waiting.push(message);
  type("");
  document.dispatchEvent(new Event("entered"));
  pump();
};
const pump = () => {
  draw();
  if (!isTaking && !isUploading() && waiting.some(({ files }) => !files)) {
    isTaking = true;
    trigger("take_files");
  }
  if (sent !== null || !globalThis.chatEvents || !find("#composer .submit-button")) return;
  const message = waiting.find(isHere);
  if (!message?.files) return;
  sent = message.id;
  draw();
  trigger("send", { id: sent });
};
globalThis.outbox = {
  returned: [],
  takeFiles: ({ text, files }) => {
    isTaking = false;
    for (const [index, message] of waiting.filter((each) => !each.files).entries()) message.files = index ? [] : files;
    pump();
    return { text, files: [] };
  },
  // A message that was taken back, or refused, stands in the text box again, before what was typed since.
  giveBack({ text, files }) {
    const back = this.returned.splice(0);
    return { text: [...back.map((each) => each.text), text].filter(Boolean).join("\n"), files: [...back.flatMap((each) => each.files ?? []), ...files] };
  },
  read: () => { const { text, files } = waiting.find(({ id }) => id === sent); return { text, files }; },
  end() { // without a reply: the server has failed
    const message = waiting.find(({ id }) => id === sent);
    sent = null;
    if (message) takeBack(message);
  },
  get unsent() { return waiting.filter((each) => isHere(each) && !isKept(each)).map(({ text }) => text); },
};
watch("value", () => {
  const { id, state } = props.value, message = waiting.find((each) => each.id === id);
  if (id !== sent) return;
  sent = null;
  if (state === "refused") takeBack(message);
  else if (state === "begun") waiting.splice(waiting.indexOf(message), 1);
  draw();
});
document.addEventListener("keydown", (event) => {
  const { key, shiftKey, isComposing, target } = event;
  if (element.isConnected && key === "Enter" && !shiftKey && !isComposing && target.matches?.(BOX)) enter(event);
}, true);
document.addEventListener("click", (event) => { if (element.isConnected && event.target.closest?.("#composer .submit-button")) enter(event); }, true);
const timer = setInterval(() => {
  if (!element.isConnected) clearInterval(timer);
  else if (waiting.length) pump();
}, PATIENCE_MS);
