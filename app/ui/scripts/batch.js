// Opens a row of the records for review, and keeps the run's id and what is shown for a reload.
const KEPT_BATCH = "troupe-batch";
element.addEventListener("click", (event) => {
  const button = event.target.closest?.("[data-row]");
  if (button) trigger("open", { row: Number(button.dataset.row) });
});
const NOTE = '<p class="figures-line" role="status">Shown before the page was loaded anew. The server no longer has this run: to review or download records, open the files and run again.</p>';
const keepShown = () => {
  const run = element.querySelector("[data-run]")?.dataset.run;
  if (run) writeBatch(run);
  if (!element.querySelector(".batch-table [data-row]")) return;
  try { sessionStorage.setItem(KEPT_BATCH, element.querySelector(".batch-table").outerHTML); } catch { /* forbidden, or too large */ }
};
watch("value", () => setTimeout(keepShown));
let before = null;
try { before = sessionStorage.getItem(KEPT_BATCH); } catch { /* forbidden */ }
if (before && element.querySelector(".empty")) {
  const box = document.createElement("div");
  box.innerHTML = NOTE + before;
  for (const button of box.querySelectorAll("[data-row]")) button.replaceWith(button.textContent);
  element.querySelector(".empty").after(box);
}
