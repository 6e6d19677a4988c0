// The models that answer: a chosen one takes the place of those before it, unless "+ Compare" opened the list.
const find = (selector) => document.querySelector(selector);
const isIn = ({ target }) => target.closest?.("#answering");
let isComparing = false, numBefore = 0;
const count = () => { numBefore = document.querySelectorAll("#answering .token").length; };
for (const kind of ["mousedown", "keydown"]) document.addEventListener(kind, (event) => { if (isIn(event)) count(); }, true);
document.addEventListener("focusout", (event) => { if (isIn(event)) isComparing = false; });
// The strip names the models that are loaded.
new MutationObserver(() => trigger("loaded")).observe(find("#strip"), { subtree: true, attributeFilter: ["data-loaded"] });
element.onclick = () => { isComparing = true; find("#answering input").focus(); };
// What was chosen in the list, with the name of the model that answers when none is.
globalThis.chooseModels = (names, own) => {
  if (!names.length) return [own];
  const isSwitched = !isComparing && numBefore > 0 && names.length > numBefore;
  if (!isSwitched) return names;
  find("#answering input").blur(); // which closes the list
  return names.slice(-1);
};
