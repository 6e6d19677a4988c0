// Turns the pages of a PDF.
element.addEventListener("click", (event) => {
  const to = event.target.closest?.("[data-number]");
  if (to && !to.disabled) trigger("turn", { number: Number(to.dataset.number) });
});
