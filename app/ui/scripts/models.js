// Shows the list of models, anew once a second while it is visible, and tells the server which button was pressed.
const list = element.querySelector(".models");
const PERIOD_MS = 1000;
let shown = "";
const show = (next) => {
  if (typeof next !== "string" || next === shown) return;
  const focus = list.contains(document.activeElement) && document.activeElement.dataset.act;
  list.innerHTML = shown = next;
  if (focus) list.querySelector(`[data-act="${CSS.escape(focus)}"]`)?.focus();
};
const refresh = async () => {
  if (element.offsetParent && !document.hidden) show(await server.look());
  setTimeout(refresh, PERIOD_MS);
};
list.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-act]");
  if (!button) return;
  button.disabled = true;
  show(await server.act(button.dataset.act));
});
refresh();
