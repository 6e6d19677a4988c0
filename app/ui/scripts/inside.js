// The tokens of every answer: kept in this browser, found through the line of figures under the answer.
// `props.value.ids` names the titled messages of the conversation in their order; `steps` has the tokens of a new answer by its id, as JSON texts.
const host = element.querySelector(".trace");
const percent = (value) => value === null ? "–" : value >= 0.9995 ? "100%" : value >= 0.001 ? `${(value * 100).toFixed(1)}%` : value > 0 ? "< 0.1%" : "0%";
const spell = (text) => text === "" ? "(end)" : text.replaceAll("\n", "⏎").replaceAll(" ", "␣");
let steps = [], place = 0, showsDrafts = false;

const drawStep = () => {
  const step = steps[place];
  for (const [index, node] of [...host.querySelectorAll(".token")].entries()) {
    node.classList.toggle("now", index === place);
    node.setAttribute("aria-selected", String(index === place));
    node.tabIndex = index === place ? 0 : -1;
  }
  const hasMask = step.pm !== null;
  const isOpen = (each) => each.pm === null || each.pm > 0;
  const rows = step.top.map((each) => make("tr", { class: isOpen(each) ? "" : "blocked" },
    make("th", { scope: "row" }, make("code", {}, spell(each.text))),
    make("td", {}, make("span", { class: "meter" }, make("i", { style: `width:${each.p * 100}%` })), ` ${percent(each.p)}`),
    ...(hasMask ? [make("td", {}, isOpen(each) ? percent(each.pm) : "not allowed")] : [])));
  const heads = hasMask ? ["most likely tokens", "before the mask", "after the mask"] : ["most likely tokens", "probability"];
  const after = hasMask ? ` before the mask, ${percent(step.pm)} after it` : "";
  const rank = step.rank === 1 ? "the most likely token" : `number ${step.rank} of the most likely tokens`;
  host.querySelector(".step").replaceChildren(
    make("p", { class: "headline", role: "status" },
      make("b", {}, `Token ${place + 1} of ${steps.length}`), ": ", make("code", { class: "taken" }, spell(step.text)),
      `, probability ${percent(step.p)}${after}, ${rank}.`,
      step.source ? ` Accepted from a draft (${step.source}).` : ""),
    make("div", { class: "columns" },
      make("table", {}, make("thead", {}, make("tr", {}, ...heads.map((word) => make("th", { scope: "col" }, word)))), make("tbody", {}, ...rows))),
  );
};

// A switch that underlines the tokens accepted from drafts; absent if there are none.
const drawDraftSwitch = () => {
  const counts = new Map();
  for (const { source } of steps) if (source) counts.set(source, (counts.get(source) || 0) + 1);
  if (!counts.size) return [];
  const box = make("input", { type: "checkbox" });
  box.checked = showsDrafts;
  box.onchange = () => { showsDrafts = box.checked; host.classList.toggle("with-drafts", showsDrafts); };
  const words = [...counts].map(([source, count]) => `${count} by ${source}`).join(", ");
  return [make("label", {}, box, make("i", { class: "k-drafted" }), `accepted from drafts: ${words}`)];
};

const go = (to, isFocused) => {
  place = Math.max(0, Math.min(steps.length - 1, to));
  drawStep();
  const token = host.querySelectorAll(".token")[place];
  if (isFocused) token.focus();
  if (isFocused) token.scrollIntoView({ block: "nearest" });
};

const showSteps = (found, words) => {
  steps = found || [];
  if (!steps.length) {
    host.replaceChildren(make("p", { class: "quiet" }, words));
    return;
  }
  const tokens = steps.map((step, index) => make("button", {
    type: "button", class: `token ${step.source ? "drafted " : ""}${step.p < 0.5 ? "torn" : step.p < 0.9 ? "unsure" : ""}`, role: "tab", "data-index": index, title: percent(step.p),
  }, spell(step.text)));
  host.replaceChildren(
    make("div", { class: "tokens", role: "tablist", "aria-label": "Tokens of the answer" }, ...tokens),
    make("p", { class: "legend" }, make("i", { class: "k-chosen" }), "probability 90% or more ", make("i", { class: "k-unsure" }), "less ", make("i", { class: "k-torn" }), "below 50%", ...drawDraftSwitch()),
    make("div", { class: "step" }));
  // Begin at a token where the choice was close, because of the mask or an alternative.
  place = steps.reduce((low, step, index) => (step.p < steps[low].p ? index : low), 0);
  drawStep();
};

host.addEventListener("click", (event) => {
  const token = event.target.closest?.(".token");
  if (token) go(Number(token.dataset.index), true);
});
host.addEventListener("mouseover", (event) => {
  const token = event.target.closest?.(".token");
  if (token && Number(token.dataset.index) !== place) go(Number(token.dataset.index), false);
});
host.addEventListener("keydown", (event) => {
  const jumps = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: steps.length - 1 };
  if (!event.target.closest?.(".token") || !(event.key in jumps)) return;
  event.preventDefault();
  go(jumps[event.key], true);
});

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
  const { ids = [], steps: fresh = {} } = props.value || {};
  answers = [...new Set(ids.filter((each) => each && !/^(reasoning|file|model:.*)$/.test(each)))];
  for (const [id, text] of Object.entries(fresh)) if (!memory.get(id)?.length) keep(id, JSON.parse(text));
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
