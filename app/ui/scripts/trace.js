// Steps through one request: shows the text as tokens, and the allowed tokens at the selected one.
const host = element.querySelector(".trace");
const percent = (value) => value === null ? "–" : value >= 0.9995 ? "100%" : value >= 0.001 ? `${(value * 100).toFixed(1)}%` : value > 0 ? "< 0.1%" : "0%";
const spell = (text) => text === "" ? "(end)" : text.replaceAll("\n", "⏎").replaceAll(" ", "␣");
let steps = [], place = 0, showsDrafts = false;

const make = (tag, attributes, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};

const drawStep = () => {
  const step = steps[place];
  for (const [index, node] of [...host.querySelectorAll(".token")].entries()) {
    node.classList.toggle("now", index === place);
    node.setAttribute("aria-selected", String(index === place));
    node.tabIndex = index === place ? 0 : -1;
  }
  const hasMask = step.pm !== null;
  const isOpen = (each) => each.allowed ?? (each.pm === null || each.pm > 0);
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
      step.is_forced ? ", the only token that the grammar allows." : `, probability ${percent(step.p)}${after}, ${rank}.`,
      step.source ? ` Accepted from a draft (${step.source}).` : ""),
    ...(step.num_allowed ? [drawShare(step)] : []),
    make("div", { class: "columns" },
      make("table", {}, make("thead", {}, make("tr", {}, ...heads.map((word) => make("th", { scope: "col" }, word)))), make("tbody", {}, ...rows)),
      ...(step.num_allowed ? [drawAllowed(step)] : [])),
  );
};

const drawShare = (step) => {
  const share = step.num_allowed / step.vocab_size;
  return make("p", { class: "share" }, make("span", { class: "meter wide" }, make("i", { style: `width:${Math.max(share * 100, 0.4)}%` })),
    ` ${step.num_allowed.toLocaleString("en")} of ${step.vocab_size.toLocaleString("en")} tokens were allowed`);
};

const drawAllowed = (step) => {
  const more = step.num_allowed - step.allowed.length;
  return make("div", { class: "allowed" }, make("p", {}, "Allowed here:"),
    ...step.allowed.map((text) => make("code", {}, spell(text))), more > 0 ? ` and ${more.toLocaleString("en")} more` : "");
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
    type: "button", class: `token ${step.source ? "drafted " : ""}${step.is_forced ? "forced" : step.p < 0.5 ? "torn" : step.p < 0.9 ? "unsure" : ""}`, role: "tab", "data-index": index, title: step.is_forced ? "forced" : percent(step.p),
  }, spell(step.text)));
  host.replaceChildren(
    make("div", { class: "tokens", role: "tablist", "aria-label": "Tokens of the answer" }, ...tokens),
    make("p", { class: "legend" }, ...(steps.some((step) => step.is_forced) ? [make("i", { class: "k-forced" }), "forced by the grammar "] : []),
      make("i", { class: "k-chosen" }), "probability 90% or more ", make("i", { class: "k-unsure" }), "less ", make("i", { class: "k-torn" }), "below 50%", ...drawDraftSwitch()),
    make("div", { class: "step" }));
  // Begin at a token where the choice was close, because of the mask or an alternative.
  const unsure = steps.map((step, index) => [step.p, index]).filter(([, index]) => !steps[index].is_forced);
  place = unsure.length ? unsure.reduce((low, each) => (each[0] < low[0] ? each : low))[1] : 0;
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
if (!("answers" in host.dataset)) {
  const take = () => showSteps(JSON.parse(props.value?.steps || "[]"), props.value?.busy ? "Running the example …" : "Nothing traced yet.");
  watch("value", take);
  take();
}
