// The schema as a form. `props.value` is the form, `props.hints` names the enforcer of each keyword, by field.
const host = element.querySelector(".schema-form");
const kinds = JSON.parse(host.dataset.kinds);

const commit = (isRedrawn) => {
  props.value = JSON.parse(JSON.stringify(form));
  if (isRedrawn) draw();
  changes.begin();
  trigger("edit");
};

const escapeStep = (name) => name.replaceAll("~", "~0").replaceAll("/", "~1");

const flag = (field, name, key, text, title) =>
  make("label", { class: "flag", title }, make("input", {
    type: "checkbox", checked: Boolean(field[key]), "aria-label": `${name}: ${text}`,
    onchange: (event) => { field[key] = event.target.checked; commit(key === "many"); },
  }), text);

const drawDetails = (field, name, pointer) => {
  const details = make("div", { class: "details" });
  details.append(make("input", {
    type: "text", class: "description", placeholder: "What the model should look for",
    value: field.description || "", "aria-label": `${name}: description`,
    oninput: (event) => { field.description = event.target.value; commit(false); },
  }));
  if (field.kind === "choice")
    details.append(make("textarea", {
      rows: 3, placeholder: "One choice per line", "aria-label": `${name}: choices, one per line`,
      oninput: (event) => { field.choices = event.target.value.split("\n").filter((line) => line.trim()); commit(false); },
    }, (field.choices || []).join("\n")));
  if (!field.many && field.kind !== "choice" && field.kind !== "group")
    details.append(flag(field, name, "nullable", "may be null", "null stands for: the text does not say"));
  const known = props.hints ?? form.hints ?? {};
  const hints = [...(known[pointer] || []), ...(field.many ? known[`${pointer}/items`] || [] : [])];
  if (hints.length)
    details.append(make("p", { class: "hints" }, ...hints.map(([keyword, who]) =>
      make("span", { class: "hint", title: `${keyword}: ${who}` }, make("code", {}, keyword), ` ${who}`))));
  return details;
};

const drawField = (fields, index, pointer, owner) => {
  const field = fields[index];
  const name = owner + (field.name || "new field");
  const here = `${pointer}/properties/${escapeStep(field.name || "")}`;
  const row = make("div", { class: "field", role: "group", "aria-label": `Field ${name}` });
  row.append(make("input", {
    type: "text", class: "name", value: field.name || "", placeholder: "name", spellcheck: false,
    "aria-label": `Name of ${owner}field ${index + 1}`,
    oninput: (event) => { field.name = event.target.value; commit(false); },
  }));
  if (field.kind === "other") {
    row.append(make("span", { class: "kind fixed", title: "Edit this field as JSON Schema" }, "written as JSON"));
  } else {
    row.append(make("select", {
      class: "kind", "aria-label": `Kind of ${name}`,
      onchange: (event) => {
        field.kind = event.target.value;
        field.more = {}; field.item_more = {};
        if (field.kind === "group" && !field.fields?.length)
          field.fields = [{ name: "name", kind: "text", required: true, description: "", more: {} }];
        if (field.kind === "choice" && !field.choices?.length) field.choices = ["yes", "no"];
        // The choices must be visible, because the user has to replace them.
        if (field.kind === "choice") field.unfolded = true;
        commit(true);
      },
    }, ...kinds.map((kind) => make("option", { value: kind, selected: kind === field.kind }, kind))));
    row.append(flag(field, name, "many", "list", "As many as the text has"));
  }
  row.append(flag(field, name, "required", "required", "The record must have this field"));
  const isOpen = Boolean(field.unfolded);
  if (field.kind !== "other")
    row.append(make("button", {
      type: "button", class: "more", "aria-expanded": String(isOpen), "aria-label": `Details of ${name}`, title: "Details",
      onclick: () => { field.unfolded = !isOpen; draw(); },
    }, isOpen ? "−" : "⋯"));
  row.append(make("button", {
    type: "button", class: "remove", "aria-label": `Remove ${name}`, title: "Remove",
    onclick: () => { fields.splice(index, 1); commit(true); },
  }, "×"));
  const box = make("div", { class: "field-box" }, row);
  if (isOpen && field.kind !== "other") box.append(drawDetails(field, name, here));
  if (field.kind === "group") {
    const inner = field.many ? `${here}/items` : here;
    box.append(make("div", { class: "inner-fields" }, ...drawFields((field.fields ||= []), inner, `${name} › `)));
  }
  return box;
};

const drawFields = (fields, pointer, owner) => [
  ...fields.map((_, index) => drawField(fields, index, pointer, owner)),
  make("button", {
    type: "button", class: "add", "aria-label": owner ? `Add field to ${owner.slice(0, -3)}` : "Add field",
    onclick: () => {
      fields.push({ name: "", kind: "text", required: true, many: false, nullable: false, description: "", more: {} });
      commit(true);
      [...host.querySelectorAll("input.name")].find((input) => !input.value)?.focus();
    },
  }, "Add field"),
];

const drawHead = () => make("div", { class: "head" }, ...[["title", "Title of the record"], ["description", "What a record is"]].map(([key, label]) =>
  make("input", { type: "text", class: key, value: form[key] || "", placeholder: label, "aria-label": label,
    oninput: (event) => { form[key] = event.target.value; commit(false); } })));

let form = {};
const draw = () => {
  const place = document.activeElement?.getAttribute("aria-label");
  if (form?.refused) host.replaceChildren(make("p", { class: "refused" }, form.refused));
  else host.replaceChildren(drawHead(), ...drawFields((form.fields ||= []), "", ""));
  if (!place || host.contains(document.activeElement)) return;
  const node = [...host.querySelectorAll("[aria-label]")].find((each) => each.getAttribute("aria-label") === place);
  node?.focus();
  node?.closest(".field-box")?.scrollIntoView({ block: "nearest" });
};
const take = () => { form = JSON.parse(JSON.stringify(props.value || {})); draw(); };
watch("value", take);
watch("hints", () => { if (!host.contains(document.activeElement)) draw(); });
take();
