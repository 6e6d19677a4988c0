// The versions of the conversation: a small switch under each message that has several; a way to ask each question again,
// which makes a version; and a way to go on with the last answer.
// It also tells the server when the page draws an answer slower than it grows.
const host = element.querySelector(".branches");
let shown = [];
const makeSwitch = (fork) => {
  const arrow = (sign, to, word) => {
    const button = make("button", { type: "button", "aria-label": `${word} version of turn ${fork.turn}`, onclick: () => trigger("turn", { at: fork.at, to }) }, sign);
    button.disabled = to < 0 || to >= fork.count;
    return button;
  };
  return make("span", { class: "branch", role: "group", "aria-label": `Versions of turn ${fork.turn}` },
    arrow("‹", fork.active - 1, "Previous"), ` ${fork.active + 1} of ${fork.count} `, arrow("›", fork.active + 1, "Next"));
};
// A switch that has not changed stays, so that a press on it is not lost.
const draw = () => {
  const before = new Map(shown.map((each) => [JSON.stringify(each.fork), each]));
  shown = (props.value || []).map((fork) => before.get(JSON.stringify(fork)) ?? { fork, node: makeSwitch(fork) });
  for (const each of before.values()) if (!shown.includes(each)) each.node.remove();
  place();
};
// Gradio redraws messages without the switches, so each is inserted again after its message and the message's buttons;
// the question's before the answer's. A switch that is in its place is not moved, because every move calls this again.
const place = () => {
  const rows = [...document.querySelectorAll("#chatbot .message-row.user-row")], ends = new Map();
  for (const { fork, node } of shown) {
    const row = rows[fork.turn - 1];
    if (!row) { if (node.parentNode !== host) host.append(node); continue; }
    node.classList.toggle("of-answer", !fork.is_question);
    const buttons = row.nextElementSibling?.classList.contains("message-buttons") ? row.nextElementSibling : row;
    const end = ends.get(row) ?? buttons;
    if (end.nextSibling !== node) end.after(node);
    ends.set(row, node);
  }
};
// Gradio says only once that the server is gone; a press after that would do nothing without a word.
const ask = (what, data) => {
  if (document.querySelector(".strip .state")?.textContent !== "not reachable") trigger(what, data);
  else warn("The server is not reachable, so nothing was asked. Press again when it is back.");
};
// Gradio offers a retry of the last answer only.
const RETRY = '<svg viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="2" stroke-linecap="round" aria-hidden="true"><path d="M20 12a8 8 0 1 1-2.4-5.7L20 8.5M20 3.5v5h-5"/></svg>';
const offerRetries = () => {
  let turn = 0;
  for (const row of document.querySelectorAll("#chatbot .message-wrap > :is(.user-row, .message-buttons-left)")) {
    if (row.classList.contains("user-row")) { turn += 1; continue; }
    const bar = row.firstElementChild, last = bar?.querySelector(".again");
    if (!bar || last?.dataset.turn === String(turn)) continue;
    last?.remove();
    const of = turn; // of this button
    const button = make("button", { type: "button", class: "icon-button again", "aria-label": "Retry", title: "Ask this question again", "data-turn": String(of), onclick: () => ask("again", { turn: of }) }, make("div", {}));
    button.firstElementChild.innerHTML = RETRY;
    bar.append(button);
  }
};
// A button behind the figures of the last answer, if that was cut off or stopped.
const more = make("button", { type: "button", class: "go-on", onclick: () => ask("go_on") }, "Continue");
const offerMore = () => {
  const row = [...document.querySelectorAll("#chatbot .message-row")].at(-1);
  const line = [...row?.querySelectorAll(".thought-group > .title") ?? []].findLast(({ textContent }) => /cut off at the token limit|\bstopped\b/.test(textContent))?.parentElement;
  const isCut = line && !document.querySelector("#growing .message-row");
  if (!isCut) more.remove();
  else if (line.nextSibling !== more) line.after(more);
};
const BUSY_MS = 1000, whenIdle = globalThis.requestIdleCallback ?? setTimeout;
let since = 0; // the time of the first change after the page was idle
const checkPace = () => {
  const now = performance.now();
  if (!since) whenIdle(() => { since = 0; });
  since ||= now;
  if (now - since < BUSY_MS || !document.querySelector("#growing .message-row")) return;
  since = now;
  trigger("behind");
};
const talk = document.querySelector("#talk");
if (talk) new MutationObserver(() => { place(); offerRetries(); offerMore(); checkPace(); }).observe(talk, { childList: true, subtree: true });
watch("value", draw);
draw();
