// Opens a row of the records for review, and keeps the run's id for a reload.
element.addEventListener("click", (event) => {
  const button = event.target.closest?.("[data-row]");
  if (button) trigger("open", { row: Number(button.dataset.row) });
});
const keepRun = () => {
  const run = element.querySelector("[data-run]")?.dataset.run;
  if (run) writeBatch(run);
};
watch("value", () => setTimeout(keepRun));
