// Makes an element: names that begin with "on" are events, values that are no texts are properties where it has them.
const make = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
};
// Shows a node for each value. One whose value has not changed stays where it is, so that a press on it is not lost.
const drawList = (list, values, drawOne) => {
  const before = new Map([...list.children].map((node) => [node.drawnOf, node]));
  const nodes = values.map((value) => {
    const drawnOf = JSON.stringify(value);
    return before.get(drawnOf) ?? Object.assign(drawOne(value), { drawnOf });
  });
  for (const node of [...list.children]) if (!nodes.includes(node)) node.remove();
  for (const [at, node] of nodes.entries()) if (list.children[at] !== node) list.insertBefore(node, list.children[at] ?? null);
};
