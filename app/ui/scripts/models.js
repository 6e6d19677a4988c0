// Shows the list of models, anew once a second while it is visible, and tells the server which button was pressed.
const list = element.querySelector(".models");
const PERIOD_MS = 1000;
let shown = "", isOpen = false;
const fold = () => {
  const button = list.querySelector("[aria-expanded]");
  if (button) button.ariaExpanded = String(isOpen);
  list.classList.toggle("folded", Boolean(button) && !isOpen);
};
const show = (next) => {
  if (typeof next !== "string" || next === shown) return;
  const { dataset: { act }, ariaExpanded } = list.contains(document.activeElement) ? document.activeElement : document.body;
  list.innerHTML = shown = next;
  fold();
  if (act || ariaExpanded) list.querySelector(act ? `[data-act="${CSS.escape(act)}"]` : "[aria-expanded]")?.focus();
};
const refresh = async () => {
  if (element.offsetParent && !document.hidden) show(await server.look());
  setTimeout(refresh, PERIOD_MS);
};
list.addEventListener("click", async (event) => {
  if (event.target.closest("[aria-expanded]")) { isOpen = !isOpen; fold(); }
  const button = event.target.closest("[data-act]");
  if (!button) return;
  button.disabled = true;
  show(await server.act(button.dataset.act));
});
refresh();
