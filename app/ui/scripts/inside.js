// The tokens of every answer: kept in this browser, found through the line of figures under the answer.
// `props.value.ids` names the titled messages of the conversation in their order; `id` and `steps`, a JSON text, are a new answer's.
const DATABASE = "troupe-tokens", MAX_KEPT = 300;
const which = element.querySelector(".which"), fold = element.querySelector(".fold"), body = element.querySelector(".body");
const memory = new Map();
let answers = [], chosen = null;

const request = (wanted) => new Promise((resolve) => {
  wanted.onsuccess = () => resolve(wanted.result);
  wanted.onerror = () => resolve(undefined);
});
// Without a database, as in some private windows, the answers of this visit can still be inspected.
const database = (() => {
  try {
    const opening = indexedDB.open(DATABASE, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("answers", { keyPath: "id" }).createIndex("time", "time");
    return request(opening);
  } catch { return Promise.resolve(undefined); }
})();
const keep = async (id, found) => {
  memory.set(id, found);
  const store = (await database)?.transaction("answers", "readwrite").objectStore("answers");
  if (!store) return;
  store.put({ id, time: Date.now(), steps: found });
  const ids = await request(store.index("time").getAllKeys()) || [];
  for (const old of ids.slice(0, -MAX_KEPT)) store.delete(old);
};
const recall = async (id) => {
  if (!memory.has(id)) {
    const store = (await database)?.transaction("answers").objectStore("answers");
    memory.set(id, (store && (await request(store.get(id)))?.steps) || []);
  }
  return memory.get(id);
};

const lines = () => [...document.querySelectorAll("#chatbot .thought-group")];
const show = async (id) => {
  chosen = id;
  const at = answers.indexOf(id);
  const arrow = (sign, to, word) => {
    const button = make("button", { type: "button", "aria-label": `${word} answer` }, sign);
    button.disabled = !(to in answers);
    button.onclick = () => { show(answers[to]); which.querySelector(`[aria-label^="${word}"]`).focus(); };
    return button;
  };
  which.replaceChildren(...(answers.length > 1 ? [arrow("‹", at - 1, "Previous"), ` Answer ${at + 1} of ${answers.length} `, arrow("›", at + 1, "Next")] : []));
  const ids = props.value?.ids || [];
  lines().forEach((line, index) => line.classList.toggle("looked-into", ids[index] === id && !body.hidden));
  const found = id ? await recall(id) : [];
  if (chosen !== id) return;
  showSteps(found, id ? "The tokens of this answer were not recorded in this browser."
    : "Ask something: every token of the answer appears here with its probability and its alternatives.");
};

const take = () => {
  const { ids = [], id, steps: fresh } = props.value || {};
  answers = ids.filter((each) => each && each !== "reasoning");
  if (id && fresh && !memory.has(id)) keep(id, JSON.parse(fresh));
  show(answers.at(-1) ?? null);
};
const choose = (event) => {
  if (!element.isConnected) return;
  if (event.type === "keydown" && event.key !== "Enter" && event.key !== " ") return;
  const line = event.target.closest?.("#chatbot .thought-group");
  const id = line && (props.value?.ids || [])[lines().indexOf(line)];
  if (!answers.includes(id)) return;
  open(true);
  show(id);
};
// In the capture phase, because the chatbot stops the propagation of events.
for (const kind of ["click", "keydown"]) document.addEventListener(kind, choose, true);
const open = (isOpen) => {
  body.hidden = !isOpen;
  fold.setAttribute("aria-expanded", String(isOpen));
};
fold.onclick = () => { open(body.hidden); show(chosen); };
watch("value", take);
take();
