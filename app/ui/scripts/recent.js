// The menu of the visitor's recent documents, or batches; `props.value` is the server's last list.
const menu = element.querySelector("select");
const when = (seconds) => new Date(seconds * 1000).toLocaleString(undefined, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
let drawn = "";
const draw = () => {
  const found = props.value?.recent ?? [], now = JSON.stringify(found);
  if (now === drawn) return; // an open menu would lose its options
  drawn = now;
  menu.replaceChildren(new Option("Recent …", ""), ...found.map(({ id, name, time, state, reader }) =>
    new Option([name, when(time), state, reader].filter(Boolean).join(" · "), id)));
  menu.hidden = !found.length;
};
menu.onchange = () => {
  const id = menu.value;
  menu.value = "";
  trigger("pick", { id });
};
// Another tab may have added one.
const seen = new AbortController();
document.addEventListener("visibilitychange", () => {
  if (!element.isConnected) seen.abort();
  else if (!document.hidden) trigger("list");
}, { signal: seen.signal });
watch("value", draw);
draw();
