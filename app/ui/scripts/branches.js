// The versions of the conversation: one small switch for each place where it was asked again.
const host = element.querySelector(".branches");
const make = (tag, attributes, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    name.startsWith("on") ? node.addEventListener(name.slice(2), value) : node.setAttribute(name, value);
  node.append(...children);
  return node;
};
const draw = () => host.replaceChildren(...(props.value || []).map((fork) => {
  const arrow = (sign, to, word) => {
    const button = make("button", { type: "button", "aria-label": `${word} version of turn ${fork.turn}`, onclick: () => trigger("turn", { at: fork.at, to }) }, sign);
    button.disabled = to < 0 || to >= fork.count;
    return button;
  };
  return make("span", { class: "branch" }, `Turn ${fork.turn} `, arrow("‹", fork.active - 1, "Previous"), ` ${fork.active + 1} of ${fork.count} `, arrow("›", fork.active + 1, "Next"));
}));
watch("value", draw);
draw();
