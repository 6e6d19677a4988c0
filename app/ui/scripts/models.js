// Shows the list of models, anew once a second while it is visible, and tells the server which button was pressed.
const list = element.querySelector(".models");
const PERIOD_MS = 1000;
let isOpen = false;
const fold = (table) => {
  const button = table.querySelector("[aria-expanded]");
  if (button) button.ariaExpanded = String(isOpen);
  list.classList.toggle("folded", Boolean(button) && !isOpen);
};
// Only the cells that have changed are drawn again, so that a press on a button is not lost.
const patch = (now, next) => {
  const before = [...now.children], after = [...next.children];
  if (!before.length || before.length !== after.length || now.matches("td, th")) now.replaceChildren(...next.childNodes);
  else for (const [at, each] of before.entries()) if (!each.isEqualNode(after[at])) patch(each, after[at]);
};
const show = (next) => {
  if (typeof next !== "string") return;
  const { dataset: { act } } = list.contains(document.activeElement) ? document.activeElement : document.body;
  const fresh = document.createElement("div");
  fresh.innerHTML = next;
  fold(fresh);
  patch(list, fresh);
  if (act) list.querySelector(`[data-act="${CSS.escape(act)}"]`)?.focus();
};
const refresh = async () => {
  if (element.offsetParent && !document.hidden) show(await server.look());
  setTimeout(refresh, PERIOD_MS);
};
list.addEventListener("click", async (event) => {
  if (event.target.closest("[aria-expanded]")) { isOpen = !isOpen; fold(list); }
  const button = event.target.closest("[data-act]");
  if (!button) return;
  button.disabled = true;
  show(await server.act(button.dataset.act));
});
refresh();
