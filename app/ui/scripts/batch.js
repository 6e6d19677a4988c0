// Opens a row of the records for review, and keeps the id of the run, or of the opened files, for a reload.
let isPicked = false; // another view of the records was asked for: the focus goes to what leads back, or on to the next
const refocus = () => {
  if (isPicked) element.querySelector(".ask-line [data-field]")?.focus();
  isPicked = false;
};
const openRow = (row) => {
  if (!row) return;
  trigger("open", { row: Number(row.dataset.row) });
  seek(60);
};
element.addEventListener("click", (event) => {
  const picked = event.target.closest?.("[data-field]");
  const acted = event.target.closest?.("[data-act]");
  if (picked) trigger("pick", { field: picked.dataset.field });
  if (acted) acted.disabled = true;
  if (acted?.dataset.act === "undo") trigger("undo");
  else if (acted) trigger("confirm", { field: acted.dataset.of, rows: [...element.querySelectorAll("[data-row]")].map((row) => Number(row.dataset.row)) });
  isPicked ||= Boolean(picked || acted);
  const isReading = getSelection()?.toString() && !event.target.closest?.("button"); // a text of the row is selected
  if (!isReading) openRow(event.target.closest?.("[data-row]"));
});
element.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.matches?.("tr[data-row]")) openRow(event.target);
});
// The row opens above the table, which may be out of sight. The focus goes to what leads to the first value to check, or
// to the next row: never to Approve, which a second press of Enter would reach.
const seek = (left) => {
  const box = document.querySelector("#batch-review"), next = box?.querySelector("[data-act=next]");
  if (!box?.offsetParent || !next) { if (left) setTimeout(() => seek(left - 1), 50); return; }
  const { top, bottom } = box.getBoundingClientRect();
  if (top < 0 || bottom > innerHeight) box.scrollIntoView();
  const steps = [...box.querySelectorAll(".bar button:not(:disabled)")]; // ..., Next row, Close
  if (element.contains(document.activeElement)) (next.disabled ? steps.at(-2) : next)?.focus({ preventScroll: true });
};
const keepRun = () => {
  const run = element.querySelector("[data-run]")?.dataset.run;
  if (run) writeBatch(run);
};
// Records never stand beside another column or schema: until they are read again, they are set aside, with an open row.
const compare = () => {
  const isStale = element.querySelector("[data-run][inert]") !== null;
  element.closest("#batch")?.classList.toggle("stale", isStale);
  for (const side of document.querySelectorAll("#batch-review .record-side")) side.inert = isStale;
};
// On a small screen the inputs fold when files are open or a run begins, so that the table is in sight.
let isOpen = false;
const fold = () => {
  const wasOpen = isOpen;
  isOpen = element.querySelector("[data-run]") !== null;
  if (!wasOpen && isOpen) foldInputs();
};
const foldInputs = () => {
  const label = document.querySelector("#batch-inputs > .label-wrap");
  if (innerWidth <= 960 && label?.classList.contains("open")) label.click();
};
for (const id of ["batch-trial", "batch-run"]) document.getElementById(id)?.addEventListener("click", () => foldInputs());
watch("value", () => setTimeout(() => { keepRun(); compare(); fold(); refocus(); }));
document.addEventListener("back", () => trigger("back"));
