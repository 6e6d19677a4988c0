// Opens a row of the records for review, and keeps the id of the run, or of the opened files, for a reload.
element.addEventListener("click", (event) => {
  const button = event.target.closest?.("[data-row]");
  if (!button) return;
  trigger("open", { row: Number(button.dataset.row) });
  seek(60);
});
// The row opens above the table, which may be out of sight.
const seek = (left) => {
  const box = document.querySelector("#batch-review"), { top } = box?.getBoundingClientRect() ?? {};
  if (box?.offsetParent) { if (top < 0 || top > innerHeight / 2) box.scrollIntoView(); }
  else if (left) setTimeout(() => seek(left - 1), 50);
};
const keepRun = () => {
  const run = element.querySelector("[data-run]")?.dataset.run;
  if (run) writeBatch(run);
};
watch("value", () => setTimeout(keepRun));
