// Links fields and evidence, and carries the review: edits in place, stepping, keeping.
const area = document.querySelector("#extract");
const all = (selector) => [...element.querySelectorAll(selector)];

const light = (number, isScrolled) => {
  for (const node of area.querySelectorAll(".lit")) node.classList.remove("lit");
  if (number === null) return;
  for (const node of area.querySelectorAll(String(number).split(" ").map((each) => `[data-field~="${each}"]`).join(","))) {
    node.classList.add("lit");
    const box = node.closest(".source pre");
    if (box && isScrolled) {
      const offset = node.getBoundingClientRect().top - box.getBoundingClientRect().top;
      if (offset < 0 || offset > box.clientHeight - 24) box.scrollTop += offset - box.clientHeight / 3;
    }
  }
};

if (area && !area.dataset.linked) {
  area.dataset.linked = "yes";
  const follow = (event) => {
    const node = event.target.closest?.("[data-field]");
    if (node) light(node.dataset.field, node.tagName !== "MARK");
    else if (event.type === "mouseover") light(area.querySelector("tr[data-field]:focus-within")?.dataset.field ?? null, false);
  };
  area.addEventListener("mouseover", follow);
  area.addEventListener("focusin", follow);
}

const isEdited = (input) => input.value !== input.defaultValue;
const showEdits = () => {
  for (const input of all(".value")) input.closest("tr").classList.toggle("edited", isEdited(input));
};
const toCheck = () => all("tr.flagged:not(.checked)");

const step = (back) => {
  const open = toCheck();
  if (!open.length) { element.querySelector('[data-act="keep"]')?.focus(); return; }
  const rows = all("tr[data-field]");
  const at = rows.indexOf(document.activeElement?.closest("tr"));
  const ahead = open.filter((row) => (back ? rows.indexOf(row) < at : rows.indexOf(row) > at));
  const next = back ? ahead.at(-1) ?? open.at(-1) : ahead[0] ?? open[0];
  const input = next.querySelector(".value");
  input?.focus();
  input?.select?.();
  next.scrollIntoView({ block: "nearest" });
};

const count = () => {
  const button = element.querySelector('[data-act="next"]');
  if (!button) return;
  const left = toCheck().length;
  const others = all("tr[data-field]:not(.checked):not(.by-hand)").length - left;
  button.textContent =
    [left && `${left} to check`, others && `${others} not looked at`].filter(Boolean).join(", ") || "All looked at";
  button.disabled = !left;
};

const readEdits = () => Object.fromEntries(all(".value").filter(isEdited).map((input) => [input.dataset.pointer, input.value]));

// Copy text selected in the evidence to the field that was edited last.
let lastInput = null;
element.addEventListener("focusin", (event) => {
  if (!event.target.matches?.(".value")) return;
  lastInput = event.target;
  if ("paged" in lastInput.dataset) trigger("locate", { pointer: lastInput.dataset.pointer });
});
if (area && !area.dataset.fills) {
  area.dataset.fills = "yes";
  area.addEventListener("mouseup", (event) => {
    const text = String(getSelection()).trim();
    if (!text || !event.target.closest?.(".source") || !lastInput?.isConnected) return;
    lastInput.value = text;
    lastInput.dispatchEvent(new Event("input", { bubbles: true }));
    lastInput.dispatchEvent(new Event("change", { bubbles: true }));
  });
}
element.addEventListener("change", (event) => { if (event.target.matches?.(".value")) trigger("edit", { edits: readEdits() }); });

element.addEventListener("input", showEdits);
element.addEventListener("click", (event) => {
  const act = event.target.closest?.("[data-act]")?.dataset.act;
  if (act === "next") step(false);
  if (act === "keep") trigger("keep", { edits: readEdits() });
  const item = event.target.closest?.("[data-items]");
  if (item) trigger("items", { pointer: item.dataset.pointer, action: item.dataset.items, edits: readEdits() });
});
element.addEventListener("keydown", (event) => {
  const row = event.target.closest?.("tr[data-field]");
  if (event.altKey && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
    event.preventDefault();
    step(event.key === "ArrowUp");
  } else if (event.key === "Enter" && !event.shiftKey && event.target.matches?.(".value")) {
    event.preventDefault();
    row.classList.add("checked");
    count();
    step(false);
  } else if (event.key === "Escape" && event.target.matches?.(".value")) {
    event.target.value = event.target.defaultValue;
    showEdits();
    event.target.dispatchEvent(new Event("change", { bubbles: true }));
  }
});
watch("value", () => {
  // A new result must not show edits of the previous one.
  for (const input of all(".value")) if (document.activeElement !== input) input.value = input.defaultValue;
  for (const row of all("tr.checked")) row.classList.remove("checked");
  showEdits();
  count();
});
